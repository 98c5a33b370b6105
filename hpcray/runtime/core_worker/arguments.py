"""Arguments of tasks and actor calls: packed by the submitter, unpacked by the worker."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpcray.common.ids import raylet_of
from hpcray.protocol import messages as m
from hpcray.protocol.serialization import PLAIN_END, SCALARS, SerializationError, Serialized, serialize
from hpcray.runtime.core_worker.context import CoreWorkerContext
from hpcray.runtime.core_worker.object_refs import ObjectRef

NO_ARGS = pickle.dumps(((), {}), 5) + PLAIN_END
_SHORT_TEXT = 1 << 12
"""Characters or bytes; shorter strings are never stored as objects."""
_TEXTS = frozenset((str, bytes))
_CONTAINERS = frozenset({list, tuple, dict, set, frozenset})
_LONG_CONTAINER = 1 << 10
"""Elements; such a container is serialized by itself first, so that a large one is not pickled a second time."""
_MAX_REMEMBERED = 64
"""Objects that are remembered as requested."""


class ArgumentSlot:
    """Stands in for a top-level ref argument; the worker puts the value in its place."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __reduce__(self) -> tuple[type[ArgumentSlot], tuple[int]]:
        return ArgumentSlot, (self.index,)


Packed = tuple[bytes, "list[Any] | None", "list[bytes] | None"]


def pack(context: CoreWorkerContext, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Packed:
    """Serialize arguments. Top-level refs become slots; large values become objects, as in Ray.

    Returns:
        The blob, the refs to keep until the reply, and the ids of the slots.
    """
    if not args and not kwargs:
        return NO_ARGS, None, None
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) not in SCALARS and not (type(value) in _TEXTS and len(value) < _SHORT_TEXT):
            break
    else:
        blob = pickle.dumps((args, kwargs), 5) + PLAIN_END
        if len(blob) < context.config.inline_limit:
            return blob, None, None
    slots: list[Any] = []
    args = tuple(_slotted(value, slots) for value in args)
    kwargs = {name: _slotted(value, slots) for name, value in kwargs.items()}
    limit = context.config.inline_limit
    try:
        if len(args) + len(kwargs) > 1 and any(map(_is_long, (*args, *kwargs.values()))):
            args, kwargs = _store_large(context, args, kwargs, _is_long, slots)
        data, refs = serialize((args, kwargs))
    except SerializationError:
        for value in (*args, *kwargs.values()):
            serialize(value)  # the error of all together does not tell which argument it is
        raise
    if _size(data) > limit:
        values = (*args, *kwargs.values())
        small = sum(len(value) for value in values if type(value) is str and len(value) < _SHORT_TEXT)
        if sum(map(_may_be_large, values)) == 1 and _size(data) - small - _SHORT_TEXT > limit:
            args, kwargs = _store_only(context, args, kwargs, data, refs, slots)
        else:
            args, kwargs = _store_large(context, args, kwargs, _may_be_large, slots)
        data, refs = serialize((args, kwargs))
    keep = slots + refs
    return data.join() if isinstance(data, Serialized) else data, keep or None, [ref._id for ref in slots] or None


def fill_slot(value: Any, values: Sequence[Any]) -> Any:
    """The value of one unpacked argument."""
    return values[value.index] if type(value) is ArgumentSlot else value


class QueuedArgumentPrefetcher:
    """Fetches to this node the arguments of tasks and calls that wait in this worker behind another one."""

    def __init__(self, context: CoreWorkerContext) -> None:
        self._context = context
        self._requested: dict[bytes, None] = {}

    def fetch(self, refs: Sequence[m.ArgRef]) -> None:
        """Fetch the arguments of a task or call that has come and waits (lock held)."""
        context, requested = self._context, self._requested
        missing = [ref for ref in refs if context.node not in ref.nodes and ref.id not in requested]
        if missing:
            requested.update((ref.id, None) for ref in missing)
            while len(requested) > _MAX_REMEMBERED:
                del requested[next(iter(requested))]
            context.engine.send(raylet_of(context.node), m.Prefetch(missing))


def _slotted(value: Any, slots: list[Any]) -> Any:
    if isinstance(value, ObjectRef):
        slots.append(value)
        return ArgumentSlot(len(slots) - 1)
    return value


def _size(data: bytes | Serialized) -> int:
    return data.size if isinstance(data, Serialized) else len(data)


def _is_long(value: Any) -> bool:
    return type(value) in _CONTAINERS and len(value) >= _LONG_CONTAINER


def _may_be_large(value: Any) -> bool:
    return not (
        type(value) is ArgumentSlot or type(value) in SCALARS or (type(value) is str and len(value) < _SHORT_TEXT)
    )


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _store_large(
    context: CoreWorkerContext,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    candidate: Callable[[Any], bool],
    slots: list[Any],
) -> _Arguments:
    """The arguments with slots for those of the candidate ones that are large: these become objects."""

    def stored(value: Any) -> Any:
        if not candidate(value):
            return value
        blob, refs = serialize(value)
        large = _size(blob) > context.config.inline_limit
        return _slotted(context.put_serialized(blob, refs), slots) if large else value

    return tuple(map(stored, args)), {name: stored(value) for name, value in kwargs.items()}


def _store_only(
    context: CoreWorkerContext,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    data: bytes | Serialized,
    refs: list[Any],
    slots: list[Any],
) -> _Arguments:
    """The arguments with a slot for the only one that may be large. Its object is made of `data`, the blob of all
    arguments, so that the value is pickled once.

    The pickle of `(args, kwargs)` becomes the pickle of `_picker(key)(args, kwargs)`. The opcodes in front memoize
    nothing, so the indexes of the memo stay as they are.
    """
    values: dict[int | str, Any] = {}
    values.update(enumerate(args))
    values.update(kwargs)
    key = next(key for key, value in values.items() if _may_be_large(value))
    blob: bytes | Serialized
    if isinstance(data, Serialized):
        blob = data.with_pickle(_call_picker(data.pickle, key))
    else:
        blob = _call_picker(data[:-1], key) + PLAIN_END
    values[key] = _slotted(context.put_serialized(blob, refs), slots)
    return tuple(values[index] for index in range(len(args))), {name: values[name] for name in kwargs}


def _call_picker(stream: bytes, key: int | str) -> bytes:
    if isinstance(key, int):
        pushed = pickle.BININT + key.to_bytes(4, "little")
    else:
        name = key.encode()
        pushed = pickle.BINUNICODE + len(name).to_bytes(4, "little") + name
    picker = pickle.GLOBAL + f"{__name__}\n{_picker.__name__}\n".encode() + pushed + pickle.TUPLE1 + pickle.REDUCE
    return b"".join((stream[:2], picker, memoryview(stream)[2:-1], pickle.REDUCE, pickle.STOP))


def _picker(key: int | str) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
    """Picks one argument: by its position, or by its name."""
    return lambda args, kwargs: args[key] if isinstance(key, int) else kwargs[key]
