"""Arguments of tasks and actor calls: packed by the submitter, unpacked by the worker."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcray.base.ids import raylet_of
from hpcray.runtime.refs import ObjectRef
from hpcray.wire import messages as m
from hpcray.wire.serialization import PLAIN_END, SCALARS, Serialized, serialize

if TYPE_CHECKING:
    from hpcray.runtime.process import Process

NO_ARGS = pickle.dumps(((), {}), 5) + PLAIN_END
_SHORT = 1 << 12
_ASKED = 64  # objects that are not asked for twice


class Slot:
    """Stands in for a top-level ref argument; the worker puts the value in its place."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __reduce__(self) -> tuple[type[Slot], tuple[int]]:
        return Slot, (self.index,)


Packed = tuple[bytes, "list[Any] | None", "list[bytes] | None"]


def pack(process: Process, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Packed:
    """Serialize arguments. Top-level refs become slots; large values become objects, as in Ray.

    Returns:
        The blob, the refs to keep until the reply, and the ids of the slots.
    """
    if not args and not kwargs:
        return NO_ARGS, None, None
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) not in SCALARS and not (type(value) is str and len(value) < _SHORT):
            break
    else:
        blob = pickle.dumps((args, kwargs), 5) + PLAIN_END
        if len(blob) < process.config.inline_limit:
            return blob, None, None
    slots: list[Any] = []
    args = tuple(_slotted(value, slots) for value in args)
    kwargs = {name: _slotted(value, slots) for name, value in kwargs.items()}
    try:
        data, refs = serialize((args, kwargs))
    except TypeError:
        _name_culprit(args, kwargs)
        raise
    limit = process.config.inline_limit
    if (data.size if isinstance(data, Serialized) else len(data)) > limit:
        args = tuple(_stored(process, value, slots, limit) for value in args)
        kwargs = {name: _stored(process, value, slots, limit) for name, value in kwargs.items()}
        data, refs = serialize((args, kwargs))
    keep = slots + refs
    return data.join() if isinstance(data, Serialized) else data, keep or None, [ref._id for ref in slots] or None


def fill(value: Any, values: Sequence[Any]) -> Any:
    """The value of one unpacked argument."""
    return values[value.index] if type(value) is Slot else value


class ArgumentsAhead:
    """Has the arguments of tasks and calls that wait in a worker, behind another one, fetched to its node meanwhile."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._asked: dict[bytes, None] = {}

    def fetch(self, refs: Sequence[m.ArgRef]) -> None:
        """Some work with these arguments has come, and waits (lock held)."""
        process, asked = self._process, self._asked
        missing = [ref for ref in refs if process.node not in ref.nodes and ref.id not in asked]
        if missing:
            asked.update((ref.id, None) for ref in missing)
            while len(asked) > _ASKED:
                del asked[next(iter(asked))]
            process.engine.send(raylet_of(process.node), m.Prefetch(missing))


def _name_culprit(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError for the argument that cannot be pickled; together they are hard to tell apart."""
    for name, value in (*enumerate(args), *kwargs.items()):
        try:
            serialize(value)
        except TypeError as error:
            raise TypeError(f"argument {name!r}: {error}") from error


def _slotted(value: Any, slots: list[Any]) -> Any:
    if isinstance(value, ObjectRef):
        slots.append(value)
        return Slot(len(slots) - 1)
    return value


def _stored(process: Process, value: Any, slots: list[Any], limit: int) -> Any:
    if type(value) is Slot or type(value) in SCALARS:
        return value
    blob, _ = serialize(value)
    if (blob.size if isinstance(blob, Serialized) else len(blob)) <= limit:
        return value
    return _slotted(process.put(value), slots)
