"""Has a core check its invariants after every event of a test."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

GCS_EVENTS = ("cluster_up", "handle", "node_died", "process_died", "tick")


def check_after(patch: pytest.MonkeyPatch, core: type[Any], events: Iterable[str]) -> None:
    """Call `check_invariants` after each of these methods, while the test runs."""
    for name in events:
        patch.setattr(core, name, _checked(getattr(core, name)))


def _checked(method: Any) -> Any:
    def checked(self: Any, *args: Any, **named: Any) -> Any:
        out = method(self, *args, **named)
        self.check_invariants()
        return out

    return checked
