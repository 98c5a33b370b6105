"""Decorators that mark the stability of a name and say so in its docstring.

A use of a deprecated name can warn too; nothing else of the decorated object changes.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from enum import Enum
from typing import Any

from hpcray.common.exceptions import RayDeprecationWarning

__all__ = ["AnnotationType", "Deprecated", "DeveloperAPI", "PublicAPI", "RayDeprecationWarning"]


class AnnotationType(Enum):
    """Stability of a name."""

    PUBLIC_API = "PublicAPI"
    DEVELOPER_API = "DeveloperAPI"
    DEPRECATED = "Deprecated"
    UNKNOWN = "Unknown"


_STABILITIES = ("stable", "beta", "alpha")
_DEPRECATED = "This API is deprecated and may be removed in future Ray releases."
_SILENCE = 'You could suppress this warning by setting env variable PYTHONWARNINGS="ignore::DeprecationWarning"'


def PublicAPI(*args: Any, **options: Any) -> Any:
    """Mark a name for users.

    Args:
        args: the class or function, where the decorator stands without parentheses.
        options: `stability`: "stable", "beta" or "alpha"; of the latter two the docstring warns. `api_group`: where
            documentation lists the name.

    Raises:
        AssertionError: the stability is another one.
    """
    if len(args) == 1 and not options and callable(args[0]):
        return PublicAPI()(args[0])
    stability = options.get("stability", "stable")
    assert stability in _STABILITIES, stability

    def mark(target: Any) -> Any:
        if stability != "stable":
            text = f"This API is in {stability} and may change before becoming stable."
            _append_doc(target, f"**PublicAPI ({stability}):** {text}")
        return _mark_annotated(target, AnnotationType.PUBLIC_API, options.get("api_group", "Others"))

    return mark


def DeveloperAPI(*args: Any, **options: Any) -> Any:
    """Mark a name for developers of libraries."""
    if len(args) == 1 and not options and callable(args[0]):
        return DeveloperAPI()(args[0])

    def mark(target: Any) -> Any:
        _append_doc(target, "**DeveloperAPI:** This API may change across minor Ray releases.")
        return _mark_annotated(target, AnnotationType.DEVELOPER_API)

    return mark


def Deprecated(*args: Any, **options: Any) -> Any:
    """Mark a name that will be removed.

    Args:
        message: the replacement, for the docstring and the warning.
        warning: issue a RayDeprecationWarning at each use.

    Raises:
        ValueError: there is no such argument.
    """
    if len(args) == 1 and not options and callable(args[0]):
        return Deprecated()(args[0])
    unknown = options.keys() - {"message", "warning"}
    if unknown:
        raise ValueError(f"Unknown kwargs: {sorted(unknown)}")
    more = [options["message"]] if "message" in options else []

    def mark(target: Any) -> Any:
        _append_doc(target, "\n".join([f"**DEPRECATED**: {_DEPRECATED}", *more]), directive="warning")
        _mark_annotated(target, AnnotationType.DEPRECATED)
        return _warning(target, "\n".join([f"{_DEPRECATED} {_SILENCE}", *more])) if options.get("warning") else target

    return mark


def _warning(target: Any, text: str) -> Any:
    """Make the use of a class or function warn; a class is changed in place."""
    used = target.__init__ if inspect.isclass(target) else target

    @functools.wraps(used)
    def use(*values: Any, **named: Any) -> Any:
        warnings.warn(text, RayDeprecationWarning, stacklevel=2)
        return used(*values, **named)

    if not inspect.isclass(target):
        return use
    target.__init__ = use  # type: ignore[method-assign]
    return target


def _mark_annotated(obj: Any, type: AnnotationType = AnnotationType.UNKNOWN, api_group: str = "Others") -> Any:
    """Note the stability of a name in its attributes. Returns the object."""
    if hasattr(obj, "__name__"):
        obj._annotated = obj.__name__
        obj._annotated_type = type
        obj._annotated_api_group = api_group
    return obj


def _is_annotated(target: Any) -> bool:
    """True if the object itself, not only a class it derives from, is marked."""
    return hasattr(target, "_annotated") and bool(target._annotated == target.__name__)


def _get_annotation_type(target: Any) -> str | None:
    return str(target._annotated_type.value) if _is_annotated(target) else None


def _get_indent(docstring: str | None) -> int:
    """Return the number of spaces before the second line of a docstring that is not empty; 0 without one."""
    lines = [line for line in (docstring or "").splitlines() if line]
    return len(lines[1]) - len(lines[1].lstrip()) if len(lines) > 1 else 0


def _append_doc(target: Any, message: str, directive: str | None = None) -> None:
    """Add a paragraph, as deep as the docstring's others, or a reStructuredText directive with it."""
    doc = (target.__doc__ or "").rstrip()
    edge = " " * _get_indent(doc)
    message = message.replace("\n", f"\n{edge}    ")
    text = f"{edge}{message}" if directive is None else f"{edge}.. {directive}::\n\n{edge}    {message}"
    target.__doc__ = f"{doc}\n\n{text}\n{edge}"
