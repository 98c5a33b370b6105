"""Functions and classes as they are sent to workers, and the texts of what cannot be sent."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
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
        text = f"hpcray: Warning: The {kind} {name} is very large ({len(blob) >> 20} MiB). {_TIP}"
        print(text, file=sys.stderr, flush=True)


def unserializable_argument(error: SerializationError, name: str) -> TypeError:
    """Return the error for an argument of the function, method or constructor `name` that does not pickle."""
    return not_serializable(f"the argument % for a task or actor {name}", error.value)


# ------------------------------------------------------------ signature
# Signatures of remote functions and methods as texts, by which arguments are checked at the call.
#
# Actor handles contain the signatures of methods, so a signature is a short text: `x,y=,/,*rest,scale=,**more`.


_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
ANYTHING = "*_,**__"
NOTHING = ""


class Arity:
    """Checks arguments against one signature.

    Attributes:
        low, high: numbers of positional arguments between which a call without keywords always matches.
    """

    __slots__ = ("_signature", "high", "low")

    def __init__(self, signature: inspect.Signature) -> None:
        parameters = signature.parameters.values()
        positional = [parameter for parameter in parameters if parameter.kind in _POSITIONAL]
        self._signature = signature
        self.low: float = sum(parameter.default is parameter.empty for parameter in positional)
        self.high: float = len(positional)
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            self.high = float("inf")
        if any(parameter.kind is _KEYWORD_ONLY and parameter.default is parameter.empty for parameter in parameters):
            self.low = float("inf")

    def check(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise TypeError for arguments that do not match the signature; `name` is the function's."""
        if not kwargs and self.low <= len(args) <= self.high:
            return
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}(): {error}; it takes ({_shown(self._signature)})") from None


def describe(function: Callable[..., Any], skip: int = 0) -> str:
    """Write the signature of a function as text, without its first `skip` parameters (self)."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return ANYTHING
    if skip and parameters and parameters[0].kind in _POSITIONAL:
        parameters = parameters[skip:]
    parts: list[str] = []
    for index, parameter in enumerate(parameters):
        name = parameter.name if parameter.default is parameter.empty else f"{parameter.name}="
        if parameter.kind is parameter.VAR_POSITIONAL:
            name = f"*{name}"
        elif parameter.kind is parameter.VAR_KEYWORD:
            name = f"**{name}"
        elif parameter.kind is _KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        parts.append(name)
        following = parameters[index + 1].kind if index + 1 < len(parameters) else None
        if parameter.kind is parameter.POSITIONAL_ONLY and following is not parameter.POSITIONAL_ONLY:
            parts.append("/")
    return ",".join(parts)


@functools.lru_cache(maxsize=4096)
def arity(text: str) -> Arity:
    """Return the checker for a signature that `describe` wrote."""
    parameters: list[inspect.Parameter] = []
    kind: inspect._ParameterKind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for part in text.split(",") if text else ():
        if part == "/":
            parameters = [parameter.replace(kind=inspect.Parameter.POSITIONAL_ONLY) for parameter in parameters]
        elif part.startswith("**"):
            parameters.append(inspect.Parameter(part[2:], inspect.Parameter.VAR_KEYWORD))
        elif part.startswith("*"):
            kind = _KEYWORD_ONLY
            if part != "*":
                parameters.append(inspect.Parameter(part[1:], inspect.Parameter.VAR_POSITIONAL))
        elif part.endswith("="):
            parameters.append(inspect.Parameter(part[:-1], kind, default=None))
        else:
            parameters.append(inspect.Parameter(part, kind))
    return Arity(inspect.Signature(parameters))


def _shown(signature: inspect.Signature) -> str:
    shown = [
        parameter.replace(default=...) if parameter.default is not parameter.empty else parameter
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=shown))[1:-1].replace("=Ellipsis", "=…")
