"""Settings of compiled graphs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any


def _setting(name: str, default: float, kind: type = int) -> Any:
    return field(default_factory=lambda: kind(float(os.environ.get(f"RAY_CGRAPH_{name}", default))))


@dataclass
class DAGContext:
    """Settings of the graphs that this process compiles. The variables `RAY_CGRAPH_<name>` set them at the start.

    Attributes:
        submit_timeout: seconds for which `execute` waits for room; -1 for any time.
        get_timeout: seconds for which `ray.get` waits for a result where it is given no timeout; -1 for any time.
        teardown_timeout: seconds for which `teardown` waits for methods that still run.
        read_iteration_timeout: without effect here; at most `get_timeout`, as in Ray.
        buffer_size_bytes: size from which a value gets memory of its own. Larger values need no setting.
        max_inflight_executions: executions that may be submitted and not finished.
        max_buffered_results: results that may wait in this process because a later one was asked for.
        overlap_gpu_communication: without effect: there are no GPU channels.
    """

    submit_timeout: float = _setting("submit_timeout", 10)
    get_timeout: float = _setting("get_timeout", 10)
    teardown_timeout: float = _setting("teardown_timeout", 30)
    read_iteration_timeout: float = _setting("read_iteration_timeout_s", 0.1, float)
    buffer_size_bytes: int = _setting("buffer_size_bytes", 1_000_000)
    max_inflight_executions: int = _setting("max_inflight_executions", 10)
    max_buffered_results: int = _setting("max_buffered_results", 1000)
    overlap_gpu_communication: bool = _setting("overlap_gpu_communication", 0, bool)

    def __post_init__(self) -> None:
        if self.read_iteration_timeout > self.get_timeout >= 0:
            raise ValueError(
                f"RAY_CGRAPH_read_iteration_timeout_s ({self.read_iteration_timeout}) must be less than or equal to "
                f"RAY_CGRAPH_get_timeout ({self.get_timeout})"
            )

    @staticmethod
    def get_current() -> DAGContext:
        """Return the settings of this process, which may be changed."""
        if not _current:
            _current.append(DAGContext())
        return _current[0]


_current: list[DAGContext] = []
