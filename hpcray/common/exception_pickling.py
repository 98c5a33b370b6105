"""Pickling of exceptions without their constructors, and tracebacks as text.

Pickle rebuilds an exception by calling its class with `args`, which fails for every class whose `__init__` takes
something else, and quietly changes the message of some. Here the object is rebuilt without calling `__init__`.
"""

from __future__ import annotations

import copyreg
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_HEAP_TYPE = 1 << 9
_PICKLE_HOOKS = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


CUSTOM: dict[type, Callable[[Any], Any]] = {}
"""Serializers of the user by class (`register_serializer`): each gives what `__reduce__` returns for an instance."""


class Portable:
    """Pickles as the exception it holds; unpickling does not call the `__init__` of the exception.

    Exception classes that define a pickle hook are pickled by that hook.
    """

    __slots__ = ("_exc",)

    def __init__(self, exc: BaseException) -> None:
        self._exc = exc

    def __reduce__(self) -> tuple[Any, ...]:
        cls = type(self._exc)
        if (
            cls in copyreg.dispatch_table
            or cls in CUSTOM
            or any(_is_heap_type(base) and _has_hook(base) for base in cls.__mro__)
        ):
            return _itself, (self._exc,)
        return reduce_exception(self._exc)


def reduce_exception(exc: BaseException) -> tuple[Any, ...]:
    """Make a pickle `__reduce__` value for `exc`: class, args, attributes and slots."""
    reduced = BaseException.__reduce__(exc) if _has_own_reduce(exc) else exc.__reduce__()
    assert isinstance(reduced, tuple)
    state = dict(reduced[2]) if len(reduced) > 2 and reduced[2] else {}
    for base in type(exc).__mro__:
        if _is_heap_type(base):
            state.update(_slots(base, exc))
    return revive, (type(exc), reduced[1], state)


def revive(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """Rebuild an exception from the parts of `reduce_exception` without calling a user's `__init__` or `__new__`."""
    exc: BaseException = bare_instance(cls, args)
    for name, value in state.items():
        object.__setattr__(exc, name, value)
    return exc


def bare_instance(cls: type[BaseException], args: tuple[Any, ...]) -> Any:
    """Make an instance of `cls` with the constructor of the built-in exception class that it extends.

    Raises:
        TypeError: no built-in base takes these arguments.
    """
    for base in cls.__mro__:
        if _is_heap_type(base) or not issubclass(base, BaseException):
            continue
        try:
            exc = base.__new__(cls, *args)
        except (TypeError, ValueError):
            continue
        with suppress(TypeError):
            base.__init__(exc, *args)
        return exc
    raise TypeError(f"no built-in base of {cls.__qualname__} can make an instance from {len(args)} args")


def copy_builtin_attributes(source: BaseException, target: BaseException) -> None:
    """Copy the attributes that built-in exceptions store outside `__dict__` (errno, filename, code, value...)."""
    for base in type(source).__mro__:
        if _is_heap_type(base) or base in (object, BaseException, Exception):
            continue
        for name in vars(base):
            if not name.startswith("__"):
                with suppress(AttributeError, TypeError):
                    object.__setattr__(target, name, getattr(source, name))


def remote_traceback(exc: BaseException) -> str:
    """Format the traceback of `exc`, causes and contexts included, without the frames of this package."""
    formatted = traceback.TracebackException.from_exception(exc)
    _drop_own_frames(formatted, set())
    return "".join(formatted.format())


def _drop_own_frames(formatted: traceback.TracebackException, seen: set[int]) -> None:
    if id(formatted) in seen:
        return
    seen.add(id(formatted))
    formatted.stack[:] = [frame for frame in formatted.stack if not frame.filename.startswith(_PACKAGE)]
    for linked in (formatted.__cause__, formatted.__context__, *(getattr(formatted, "exceptions", None) or ())):
        if linked is not None:
            _drop_own_frames(linked, seen)


def _itself(exc: BaseException) -> BaseException:
    return exc


def _is_heap_type(cls: type) -> bool:
    """True for a class that a `class` statement created, False for a built-in one."""
    return bool(cls.__flags__ & _HEAP_TYPE)


def _has_hook(cls: type) -> bool:
    return any(hook in vars(cls) for hook in _PICKLE_HOOKS)


def _has_own_reduce(exc: BaseException) -> bool:
    """True if `exc.__reduce__` is a Python function, as in hpcray's errors, where it calls `reduce_exception`."""
    return any(_is_heap_type(base) and "__reduce__" in vars(base) for base in type(exc).__mro__)


def _slots(cls: type, exc: BaseException) -> dict[str, Any]:
    slots = vars(cls).get("__slots__", ())
    found = {}
    for slot in (slots,) if isinstance(slots, str) else slots:
        if slot.startswith("__"):
            name = slot if slot.endswith("__") else f"_{cls.__name__.lstrip('_')}{slot}"
        else:
            name = slot
        if name not in ("__dict__", "__weakref__"):
            with suppress(AttributeError):
                found[name] = object.__getattribute__(exc, name)
    return found
