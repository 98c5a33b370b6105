"""Functions and classes as they are sent to workers, and the texts of what cannot be sent."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import cloudpickle

from hpcray.common.exceptions import OufOfBandObjectRefSerializationException
from hpcray.protocol.serializability import not_serializable
from hpcray.protocol.serialization import SerializationError, Serialized, serialize
from hpcray.runtime.core_worker.core_worker import OUT_OF_BAND

LARGE = 10**7
"""Bytes of a pickled function or class above which a warning is printed."""
TOO_LARGE = 10**8
"""Bytes from which it is refused."""
_TIP = (
    "Check that its definition is not implicitly capturing a large array or other object in scope. Tip: use ray.put() "
    "to put large objects in the Ray object store."
)


def full_name(target: Any) -> str:
    """Return the module and the qualified name of a function or class."""
    return f"{target.__module__}.{getattr(target, '__qualname__', type(target).__qualname__)}"


def exported(target: Any, what: str) -> tuple[bytes, list[Any]]:
    """Pickle a function or class.

    Returns:
        The blob, and the refs inside of it.

    Raises:
        TypeError: it does not pickle; the text begins with `what` and names the variable that does not.
        OufOfBandObjectRefSerializationException: it captures a ref, which this program forbids.
    """
    try:
        blob, refs = serialize(target)
    except SerializationError as error:
        raise not_serializable(what, target) from error
    if refs and os.environ.get(OUT_OF_BAND) == "0":
        raise OufOfBandObjectRefSerializationException(
            f"{what} captures {refs[0]!r}; hint: pass it as an argument, or set {OUT_OF_BAND}=1"
        )
    return blob.join() if isinstance(blob, Serialized) else blob, refs


_OF_THE_CLASS = ("__class_getitem__", "__del__", "__init_subclass__", "__new__")


def changed_methods(cls: type) -> dict[str, Callable[..., Any]]:
    """Return the methods of a class, its bases' included, which a process that imports the class may lack: functions
    that were not written in the class, so that the program may have put them there. Empty for a class that travels by
    value."""
    found: dict[str, Callable[..., Any]] = {}
    if not _is_imported(cls):
        return found
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            written = getattr(member, "__module__", ""), getattr(member, "__qualname__", "")
            if (
                isinstance(member, FunctionType)
                and name not in _OF_THE_CLASS
                and written != (base.__module__, f"{base.__qualname__}.{name}")
            ):
                found[name] = member
            else:
                found.pop(name, None)
    return found


def _is_imported(cls: type) -> bool:
    module = cls.__module__
    by_value = module == "__main__" or module in cloudpickle.list_registry_pickle_by_value()
    return not by_value and getattr(sys.modules.get(module), cls.__qualname__, None) is cls


class ChangedClass:
    """A class that workers import, and then give methods. Pickles as such a class."""

    def __init__(self, cls: type, methods: dict[str, Callable[..., Any]]) -> None:
        self._parts = cls, methods

    def __reduce__(self) -> tuple[Any, ...]:
        return with_methods, self._parts


def with_methods(cls: type, methods: dict[str, Callable[..., Any]]) -> type:
    """Return a subclass with these methods, and the name of the class."""
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (cls,), {**named, **methods})


def check_size(blob: bytes, kind: str, name: str) -> None:
    """Print a warning for a large function or class, and raise ValueError for one that is too large.

    Args:
        kind: "remote function" or "actor".
    """
    if len(blob) >= TOO_LARGE:
        raise ValueError(
            f"The {kind} {name} is too large ({len(blob) >> 20} MiB > FUNCTION_SIZE_ERROR_THRESHOLD={TOO_LARGE >> 20} "
            f"MiB). {_TIP}"
        )
    if len(blob) > LARGE:
        print(
            f"hpcray: Warning: The {kind} {name} is very large ({len(blob) >> 20} MiB). {_TIP}",
            file=sys.stderr,
            flush=True,
        )


def unserializable_argument(error: SerializationError, name: str) -> TypeError:
    """Return the error for an argument of the function, method or constructor `name` that does not pickle."""
    return not_serializable(f"the argument % for a task or actor {name}", error.value)
