"""What drivers and workers both ask of actors; the rest of `actor_host` is for workers alone."""

from __future__ import annotations

import inspect

MARK = "__hpcray_on_drain__"
"""Attribute of methods that `on_drain` decorates."""


class ExitActor(SystemExit):
    """Raised by `exit_actor` inside a method."""


def has_async_method(cls: type) -> bool:
    """Whether a class makes an async actor: any of its methods is a coroutine function or an async generator."""
    return any(
        inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)
        for _, member in inspect.getmembers(cls, inspect.isfunction)
    )
