"""Custom serializers of classes, and the search for the parts of a value that do not pickle."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import cloudpickle

from hpcray.protocol.out_of_band import reduce_with

__all__ = ["deregister_serializer", "register_serializer"]


def register_serializer(cls: type, *, serializer: Callable[[Any], Any], deserializer: Callable[[Any], Any]) -> None:
    """Set the serializer for values of exactly this class, without its subclasses.

    The registration applies to values that this process sends. A receiver needs none: the deserializer is sent with the
    value.

    Args:
        cls: the class.
        serializer: converts a value to an object that pickles.
        deserializer: converts that object to a value.

    Raises:
        TypeError: `cls` is no class.
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_serializer takes a class, got {cls!r}")
    reduce_with(cls, lambda value: (deserializer, (serializer(value),)))


def deregister_serializer(cls: type) -> None:
    """Remove the serializer of a class, if there is one."""
    reduce_with(cls, None)


_INDENT = 4


class FailureTuple:
    """A part of a value that does not pickle, though all of its own parts do.

    Attributes:
        obj: the part.
        name: name of the part in `parent`.
        parent: the value that refers to the part.
    """

    def __init__(self, obj: Any, name: str, parent: Any) -> None:
        self.obj, self.name, self.parent = obj, name, parent

    def __repr__(self) -> str:
        return f"FailTuple({self.name} [obj={self.obj!r}, parent={self.parent!r}])"


def inspect_serializability(
    base_obj: Any, name: str | None = None, depth: int = 3, print_file: TextIO | None = None
) -> tuple[bool, set[FailureTuple]]:
    """Check if a value pickles, find the parts that do not, and print a report.

    Args:
        base_obj: any value. The parts of a function are its globals and closure, those of an object its attributes.
        name: name of the value in the report.
        depth: number of levels of parts to search.
        print_file: file for the report; None for standard output.

    Returns:
        (True if the value pickles, the parts that do not).
    """
    search = _Search(print_file or sys.stdout)
    title = name or _name_of(base_obj)
    search.say(f"Checking serializability of {title}: {base_obj!r}", 0)
    if not search.look(base_obj, title, None, depth, 0):
        return True, set()
    found = set(search.found.values())
    search.say("These parts cannot be pickled:", 0)
    for failure in found:
        search.say(f"{failure.name}: {failure.obj!r}, in {failure.parent!r}", 1)
    search.say("hint: make them inside the task or actor, or leave them out of the state with __reduce__", 0)
    return False, found


class _Search:
    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._seen: set[int] = set()
        self.found: dict[int, FailureTuple] = {}

    def say(self, text: str, level: int) -> None:
        print(" " * (_INDENT * level) + text, file=self._file)

    def look(self, obj: Any, name: str, parent: Any, depth: int, level: int) -> bool:
        """Return True if `obj` does not pickle, and record its smallest parts that do not."""
        error = _error_of(obj)
        if error is None:
            return False
        if id(obj) in self._seen:
            return True
        self._seen.add(id(obj))
        self.say(f"{name}: {type(error).__name__}: {error}", level + 1)
        blamed = [self.look(part, label, obj, depth - 1, level + 1) for label, part in _parts_of(obj)] if depth else []
        if not any(blamed):
            self.found[id(obj)] = FailureTuple(obj, name, obj if parent is None else parent)
        return True


def _error_of(obj: Any) -> Exception | None:
    try:
        cloudpickle.dumps(obj)
    except Exception as error:  # pickling runs any code
        return error
    return None


def _name_of(obj: Any) -> str:
    return str(getattr(obj, "__name__", None) or type(obj).__name__)


def _parts_of(obj: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the parts that the pickle of a value contains, with names."""
    if inspect.isfunction(obj):
        variables = inspect.getclosurevars(obj)
        yield from {**variables.globals, **variables.nonlocals}.items()
        for index, default in enumerate(obj.__defaults__ or ()):
            yield f"default {index}", default
    elif inspect.ismethod(obj):
        yield "__self__", obj.__self__
    elif isinstance(obj, dict):
        yield from ((repr(key), value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    elif inspect.isclass(obj):
        yield from ((key, value) for key, value in vars(obj).items() if not key.startswith("__"))
    else:
        yield from getattr(obj, "__dict__", {}).items()
