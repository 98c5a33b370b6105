"""Decorators that mark the stability of a name. They do not change the behavior of the decorated object."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from enum import Enum
from typing import Any

__all__ = ["AnnotationType", "Deprecated", "DeveloperAPI", "PublicAPI", "RayDeprecationWarning"]


class AnnotationType(Enum):
    """Stability of a name."""

    PUBLIC_API = "PublicAPI"
    DEVELOPER_API = "DeveloperAPI"
    DEPRECATED = "Deprecated"
    UNKNOWN = "Unknown"


class RayDeprecationWarning(DeprecationWarning):
    """Warning that a name will be removed."""


def _marked(target: Any, kind: AnnotationType) -> Any:
    target._annotated = getattr(target, "__name__", "")
    target._annotated_type = kind
    return target


def _mark(kind: AnnotationType) -> Callable[..., Any]:
    def decorate(*args: Any, **options: Any) -> Any:
        if len(args) == 1 and not options and callable(args[0]):
            return _marked(args[0], kind)
        return lambda target: _marked(target, kind)

    return decorate


_public = _mark(AnnotationType.PUBLIC_API)
_developer = _mark(AnnotationType.DEVELOPER_API)


def PublicAPI(*args: Any, **options: Any) -> Any:
    """Mark a name for users.

    Args:
        stability: "stable", "beta" or "alpha".
        api_group: without effect.
    """
    if args and not options and len(args) == 1 and callable(args[0]):
        return _public(args[0])
    stability = options.get("stability", "stable")
    if stability not in ("stable", "beta", "alpha"):
        raise ValueError(f"stability must be stable, beta or alpha, not {stability!r}")
    return _public(**options)


def DeveloperAPI(*args: Any, **options: Any) -> Any:
    """Mark a name for developers of libraries."""
    return _developer(*args, **options)


def Deprecated(*args: Any, **options: Any) -> Any:
    """Mark a name that will be removed.

    Args:
        message: the replacement.
        warning: issue a RayDeprecationWarning at each use.
    """
    if len(args) == 1 and not options and callable(args[0]):
        return _marked(args[0], AnnotationType.DEPRECATED)
    message, warn = options.get("message", ""), options.get("warning", False)

    def decorate(target: Any) -> Any:
        text = f"{target.__name__} is deprecated. {message}".rstrip()
        if not warn:
            return _marked(target, AnnotationType.DEPRECATED)
        if inspect.isclass(target):
            old = target.__init__

            @functools.wraps(old)
            def init(self: Any, *values: Any, **named: Any) -> None:
                warnings.warn(text, RayDeprecationWarning, stacklevel=2)
                old(self, *values, **named)

            setattr(target, "__init__", init)  # noqa: B010
            return _marked(target, AnnotationType.DEPRECATED)

        @functools.wraps(target)
        def call(*values: Any, **named: Any) -> Any:
            warnings.warn(text, RayDeprecationWarning, stacklevel=2)
            return target(*values, **named)

        return _marked(call, AnnotationType.DEPRECATED)

    return decorate
