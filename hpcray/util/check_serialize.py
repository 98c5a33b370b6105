"""Why a value cannot be sent to another process: which part of it does not pickle."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import cloudpickle

_INDENT = 4


class FailureTuple:
    """A part of a value that does not pickle, and none of whose own parts is to blame.

    Attributes:
        obj: the part.
        name: what it is called in `parent`.
        parent: the value that refers to it.
    """

    def __init__(self, obj: Any, name: str, parent: Any) -> None:
        self.obj, self.name, self.parent = obj, name, parent

    def __repr__(self) -> str:
        return f"FailTuple({self.name} [obj={self.obj!r}, parent={self.parent!r}])"


def inspect_serializability(
    base_obj: Any, name: str | None = None, depth: int = 3, print_file: TextIO | None = None
) -> tuple[bool, set[FailureTuple]]:
    """Say whether a value pickles and, if not, which of its parts are to blame. A report is printed.

    Args:
        base_obj: any value; of a function the globals and the closure are looked at, of an object its attributes.
        name: how the report calls it.
        depth: how many levels of parts are looked at.
        print_file: where the report goes; None: standard output.

    Returns:
        (whether it pickles, the parts to blame).
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
        """Whether `obj` fails; notes the smallest parts of it that do."""
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
    """What goes into the pickle of a value, by name."""
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
