"""The search for the parts of a value that do not pickle."""

from __future__ import annotations

import inspect
import io
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any, TextIO

import cloudpickle

from hpcray.protocol.out_of_band import pickling

_INDENT = 4
_WIDTH = 80
_SHOWN = 1000
"""Characters of a value that a report shows."""
_SEARCHED = 10_000
"""Parts of one value that are looked at."""


class FailureTuple:
    """A part of a value that does not pickle, though all of its own parts do.

    Attributes:
        obj: the part.
        path: names that lead to the part, from the outermost value that has one.
        parent: the value that refers to the part.
    """

    def __init__(self, obj: Any, path: tuple[str, ...], parent: Any) -> None:
        self.obj, self.path, self.parent = obj, path, parent

    @property
    def name(self) -> str:
        """Name of the part in `parent`."""
        return self.path[-1] if self.path else "unknown"

    def __repr__(self) -> str:
        obj, parent = _shown(self.obj), _shown(self.parent)
        return f"FailTuple({self.name} [path={' -> '.join(self.path)}, obj={obj}, parent={parent}])"


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
    title = f"Checking Serializability of {_shown(base_obj)}"
    line = "=" * min(len(title), _WIDTH)
    search.say(f"{line}\n{title}\n{line}", 0)
    if not search.look(base_obj, (name or _name_of(base_obj),), None, depth, 0):
        return True, set()
    found = set(search.found.values())
    parts = "\n".join(map(str, found))
    search.say(
        f"{line}\nVariable: \n\n\t{parts}\n\nwas found to be non-serializable. There may be multiple other undetected "
        "variables that were non-serializable. \nConsider either removing the instantiation/imports of these variables "
        "or moving the instantiation into the scope of the function/class. A class can leave them out of its pickle "
        f"with __reduce__.\n{line}",
        0,
    )
    return False, found


def not_serializable(what: str, value: Any) -> TypeError:
    """Return the error for a value that does not pickle, with the report of `inspect_serializability`.

    Args:
        what: what the value is; "%" stands for the value itself.
        value: the value.
    """
    file = io.StringIO()
    try:
        inspect_serializability(value, print_file=file)
    except Exception as error:  # of code of the user
        file.write(f"{type(error).__name__}: {error}\n")
    return TypeError(f"Could not serialize {what.replace('%', _shown(value), 1)}:\n{file.getvalue()}")


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # of code of the user
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


class _Search:
    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._seen: set[int] = set()
        self.found: dict[int, FailureTuple] = {}

    def say(self, text: str, level: int) -> None:
        print(" " * (_INDENT * level) + text, file=self._file)

    def look(self, obj: Any, path: tuple[str, ...], parent: Any, depth: int, level: int) -> bool:
        """Return True if `obj` does not pickle, and record its smallest parts that do not."""
        error = _error_of(obj)
        if error is None:
            return False
        if id(obj) in self._seen:
            return True
        self._seen.add(id(obj))
        self.say(f"!!! FAIL serialization of {path[-1]!r}: {type(error).__name__}: {error}", level)
        parts = islice(_parts_of(obj), _SEARCHED if depth else 0)
        blamed = [self.look(part, (*path, label), obj, depth - 1, level + 1) for label, part in parts]
        if not any(blamed):
            self.found[id(obj)] = FailureTuple(obj, path, obj if parent is None else parent)
        return True


def _error_of(obj: Any) -> Exception | None:
    outer, pickling.refs = pickling.refs, []  # nobody reads the pickle: a ref in it must not be kept for its sake
    try:
        cloudpickle.dumps(obj)
    except Exception as error:  # pickling runs any code
        return error
    finally:
        pickling.refs = outer
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
