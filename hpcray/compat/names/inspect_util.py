"""`ray._private.inspect_util`: kinds of functions."""

from __future__ import annotations

import inspect
from typing import Any


def is_cython(obj: Any) -> bool:
    """Return True for a function or method that Cython compiled."""
    return any(type(one).__name__ == "cython_function_or_method" for one in (obj, getattr(obj, "__func__", None)))


def is_function_or_method(obj: Any) -> bool:
    """Return True for a function or method, one of Cython too."""
    return inspect.isfunction(obj) or inspect.ismethod(obj) or is_cython(obj)


def is_class_method(f: Any) -> bool:
    """Return True for a bound method."""
    return getattr(f, "__self__", None) is not None


def is_static_method(cls: type, f_name: str) -> bool:
    """Return True if the class has a static method of this name."""
    return isinstance(inspect.getattr_static(cls, f_name, None), staticmethod)
