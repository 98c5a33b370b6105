"""Settings of one node, in one dataclass. Every one can be set by the environment variable `HPCRAY_<NAME>`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Config:
    """Times in seconds, sizes in bytes.

    Attributes:
        start_timeout: every rank must be up within this time.
        stop_timeout: processes that have not left on request by then are killed.
        inline_limit: values up to this size travel inside messages; larger ones live in node stores.
        idle_lease_timeout: a lease with nothing to do is given back after this time.
        idle_worker_timeout: a worker above the node's CPU count is ended after this idle time.
        tick: period of a raylet's housekeeping (parent alive, heartbeats).
        heartbeat_timeout: a raylet not heard of for this long is dead.
        object_store_memory: arena size; 0 means 30 % of the memory this node may use.
        data_plane: "auto", "ucx" or "mpi".
        max_workers: most workers of one node; 0 means what `ulimit -u` and memory allow.
        prestart: workers forked before they are asked for; -1 means one per CPU.
        log_to_driver: whether prints of workers reach the driver's terminal.
    """

    start_timeout: float = 60.0
    stop_timeout: float = 2.0
    inline_limit: int = 100 * 1024
    idle_lease_timeout: float = 0.1
    idle_worker_timeout: float = 10.0
    tick: float = 0.5
    heartbeat_timeout: float = 30.0
    object_store_memory: int = 0
    data_plane: str = "auto"
    max_workers: int = 0
    prestart: int = -1
    log_to_driver: bool = True

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **given: Any) -> Config:
        """Defaults, overridden by `HPCRAY_*` variables, overridden by `given` (None means not given).

        Raises:
            ValueError: a variable does not parse; the message names it.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for field in fields(cls):
            text = environ.get("HPCRAY_" + field.name.upper())
            if text is not None:
                values[field.name] = _parse(field.name, text, type(field.default))
        values.update({name: value for name, value in given.items() if value is not None})
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """All settings, for a message."""
        return asdict(self)


def _parse(name: str, text: str, kind: type) -> Any:
    try:
        if kind is bool:
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"HPCRAY_{name.upper()}={text!r} is not a valid {kind.__name__}") from None
