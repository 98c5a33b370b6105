"""What a core was told and what it decided, so that the same decisions can be made again and looked at.

A recorded core is the core itself, with its inputs noted as they come; nobody else notices. The record is bounded: a
core whose first inputs are forgotten cannot be replayed, and the record says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Union

import msgspec

from hpcray.base.config import Config
from hpcray.base.ids import show_proc
from hpcray.core.gcs.head import HeadCore
from hpcray.core.raylet import RayletCore
from hpcray.core.store.node_store import NodeStore
from hpcray.wire.messages import Message, NodeInfo

MOST_INPUTS = 200_000
MOST_BYTES = 64 << 20
SHOWN = 400
"""Characters of effects that a record shows to people."""

_Time = float
_Text = Union[str, None]
_INPUTS: dict[str, dict[str, Any]] = {
    "raylet": {
        "handle": tuple[_Time, bytes, Message],
        "process_joined": tuple[_Time, bytes, str, int],
        "process_died": tuple[_Time, bytes, str],
        "fork_failed": tuple[_Time, int, str],
        "remote_process_died": tuple[_Time, bytes],
        "node_died": tuple[_Time, int],
        "drain": tuple[_Time],
        "head_moved": tuple[_Time],
        "start": tuple[_Time],
        "tick": tuple[_Time],
        "new_number": tuple[()],
    },
    "head": {
        "cluster_up": tuple[_Time, str, list[NodeInfo]],
        "handle": tuple[_Time, bytes, Message],
        "node_died": tuple[_Time, int, str],
        "process_died": tuple[_Time, bytes, str],
        "tick": tuple[_Time],
    },
    "store": {
        "handle": tuple[_Time, bytes, Message],
        "received": tuple[_Time, int, _Text],
        "sent": tuple[_Time, int, _Text],
        "spilled": tuple[_Time, _Text],
        "restored": tuple[_Time, bytes, _Text],
        "stalled": tuple[_Time, list[bytes], str],
        "process_died": tuple[_Time, bytes],
        "node_died": tuple[_Time, int],
        "tick": tuple[_Time],
    },
}


class Input(msgspec.Struct, array_like=True):
    """One input: the method, its packed arguments, and the digest and the beginning of the effects it had.

    depth, anchor: of one that came while the core dealt with another (see `core.owner.noted`): how deep, during which
    effect of that. facts: what the core looked at that is not its own.
    """

    method: str
    args: bytes
    digest: bytes
    effects: str
    depth: int = 0
    anchor: bytes = b""
    facts: list[tuple[bytes, Any]] = []


class Record(msgspec.Struct):
    """All inputs of one core.

    made: how to make it again (`make`). forgotten: inputs that are not in the record. proc: of an owner, its process.
    """

    core: str
    node: int
    made: dict[str, Any]
    inputs: list[Input] = []
    forgotten: int = 0
    proc: bytes = b""


class Recorder:
    """Notes what one core is told."""

    def __init__(self, core: str, node: int, made: dict[str, Any]) -> None:
        self.record = Record(core, node, made, [])
        self._bytes = 0

    def wrap(self, target: Any, name: str) -> Callable[..., Any]:
        """Note every call of a method from now on; the new method, which its object has already."""
        method = getattr(target, name)
        encode = msgspec.msgpack.encode

        def noted(*args: Any) -> Any:
            packed = encode(args)  # before: what it is given may be changed
            effects = method(*args)
            self._note(name, packed, effects)
            return effects

        setattr(target, name, noted)
        return noted

    def methods(self) -> list[str]:
        """The names of the methods that take inputs."""
        return list(_INPUTS[self.record.core])

    def _note(self, name: str, packed: bytes, effects: Any) -> None:
        record = self.record
        if record.forgotten or len(record.inputs) >= MOST_INPUTS or self._bytes >= MOST_BYTES:
            record.forgotten += 1
            return
        text = show(effects)[:SHOWN]
        self._bytes += len(packed) + len(text)
        record.inputs.append(Input(name, packed, digest(effects), text))


@dataclass
class Difference:
    """An input after which a core decided otherwise than it had."""

    step: int
    method: str
    args: str
    then: str
    now: str


@dataclass
class Replay:
    """How a replay went. steps: inputs that were given again."""

    core: str
    node: int
    steps: int = 0
    differences: list[Difference] = field(default_factory=list)
    error: str = ""
    proc: bytes = b""

    @property
    def name(self) -> str:
        """For people."""
        return f"node {self.node} {self.core}{f' {show_proc(self.proc)}' if self.proc else ''}"


def replay(record: Record, most: int = 10) -> Replay:
    """Make the core again, tell it the same, and compare what it decides.

    Args:
        record: from its first input on. most: stop after so many differences; what follows one may follow from it.
    """
    done = Replay(record.core, record.node, proc=record.proc)
    if record.forgotten:
        done.error = f"its last {record.forgotten} inputs are not in the record, which was full"
    if record.core == "owner":
        from hpcray.core.owner.again import replay_owner  # a process that records has no use for it

        replay_owner(record, done, most)
        return done
    core = make(record)
    decoders = {name: msgspec.msgpack.Decoder(kind) for name, kind in _INPUTS[record.core].items()}
    for step, given in enumerate(record.inputs):
        args = decoders[given.method].decode(given.args)
        target = core.pool if given.method == "new_number" else core
        effects = getattr(target, given.method)(*args)
        done.steps += 1
        if digest(effects) != given.digest:
            found = Difference(step, given.method, repr(args)[:SHOWN], given.effects, show(effects)[:SHOWN])
            done.differences.append(found)
            if len(done.differences) >= most:
                break
    return done


def inputs_of(core: str) -> Mapping[str, Any]:
    """The methods by which a core is told something, with the types of their arguments."""
    return _INPUTS[core]


def portion(record: Record, start: int, size: int = 1 << 20) -> Any:
    """The record from input `start` on, about `size` bytes of it, as it travels."""
    chosen, taken = [], 0
    for given in record.inputs[start:]:
        chosen.append(given)
        taken += len(given.args) + len(given.effects)
        if taken >= size:
            break
    return msgspec.to_builtins(msgspec.structs.replace(record, inputs=chosen), builtin_types=(bytes,))


def make(record: Record) -> Any:
    """A core as it was before its first input."""
    made: Mapping[str, Any] = record.made
    config = Config(**made["config"])
    if record.core == "head":
        return HeadCore(config)
    if record.core == "store":
        return NodeStore(record.node, **made["store"])
    core = RayletCore(record.node, made["total"], made["cluster_size"], config, made["gpu_ids"])
    core.pool.limit = made["limit"]
    return core


def show(effects: Any) -> str:
    """Effects as text, for people."""
    return "\n".join(sorted(map(repr, _each(effects))))


def digest(effects: Any) -> bytes:
    """What effects are compared by, the same in every process: neither their order counts, which may be that of a set,
    nor that of the keys of what they carry."""
    text = "\n".join(sorted(repr(_canonical(effect)) for effect in _each(effects)))
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).digest()


def _canonical(value: Any) -> Any:
    """The same text for the same content: maps are sorted, objects are their fields."""
    if isinstance(value, dict):
        return sorted((repr(key), repr(_canonical(item))) for key, item in value.items())
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    names = getattr(value, "__struct_fields__", None)
    if names is None and is_dataclass(value):
        names = tuple(one.name for one in fields(value))
    if names is None:
        return value
    return (type(value).__name__, *(_canonical(getattr(value, name)) for name in names))


def _each(effects: Any) -> Iterable[Any]:
    return effects if isinstance(effects, (list, tuple)) else [effects]
