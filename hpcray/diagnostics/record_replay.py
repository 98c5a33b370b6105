"""The inputs of a core and the effects it had, so that the same decisions can be made again and compared.

A recorded core is the core itself, with its inputs noted as they come. The record is bounded: it keeps the first ones,
and says how many came after it was full.

A raylet, a head and a store return their effects. An object table calls out while it handles an input: it sends, wakes
waiters, has a task run again. The code that is called may call the table again before it returns, so inputs nest, and
each notes the effect of the outer one during which it came. Values of objects are noted by a digest: a table passes
them on and looks only at their last byte.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary, WeakValueDictionary

import msgspec

from hpcray.common.config import Config
from hpcray.common.ids import node_of, show_proc
from hpcray.common.keyed_hash import blake2b
from hpcray.core.core_worker.object_entry import ValueHints
from hpcray.core.core_worker.object_pins import NeighborStores, ObjectPins
from hpcray.core.core_worker.object_recovery import KeptCopies, Lineage, ObjectRecovery, Replication
from hpcray.core.core_worker.object_table import ObjectTable, Waiter
from hpcray.core.core_worker.reference_counter import ReferenceCounter
from hpcray.core.gcs.gcs import Gcs
from hpcray.core.gcs.placement_group_scheduler import NearSets
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.core.raylet.local_lease_manager import LocalLeaseManager
from hpcray.core.raylet.worker_pool import WorkerPool
from hpcray.protocol import messages as m
from hpcray.protocol.messages import Message
from hpcray.protocol.messages.objects import ERROR

MOST_INPUTS = 200_000
MOST_BYTES = 64 << 20
SHOWN = 400
"""Characters of effects that a record shows to people."""

_LONGEST = 32
"""Bytes; longer byte strings are values, not ids, and noted by their digest."""
_NEVER = 1 << 60
"""A waiter that counts down from here wakes no thread: the consequences are in the record."""
_TABLE_MESSAGES = (
    m.Free, m.ObjectGet, m.ObjectReady, m.ObjectLost, m.AddLocation, m.Open, m.Release, m.RaisePriority, m.DiskRead,
    m.BorrowAck, m.BorrowAdd, m.SettleBorrows, m.BorrowDrop, m.BorrowsSettled, m.BorrowTake,
)  # fmt: skip


class Opaque(msgspec.Struct, array_like=True, frozen=True):
    """Stands for a message that an object table only holds back for a while."""

    kind: str
    digest: bytes


class TaskStandIn:
    """A task in a replay, as far as an object table looks at it."""

    def __init__(self, ident: bytes) -> None:
        self.id = ident
        self.retries, self.attempt, self.cancelled = -1, 0, False


class Outlet:
    """In the types of inputs, an argument that the core calls, or a `NeighborStores`; in a replay calls do nothing."""

    def __call__(self, *args: Any) -> None:
        pass

    meet = send = leave = __call__


_Parts = dict[str, tuple[type, str]]
_INPUTS: dict[str, _Parts] = {
    "raylet": {
        "": (
            LocalLeaseManager,
            "handle process_joined process_died fork_failed remote_process_died node_died drain head_moved "
            "ask_worker_to_leave cluster_grew nodes_placed evict_idle_workers leave start tick",
        ),
        "pool": (WorkerPool, "new_number"),
    },
    "head": {"": (Gcs, "cluster_up nodes_joined handle node_died process_died set_draining set_time_left tick")},
    "store": {
        "": (
            ObjectStore,
            "handle receive_ended send_ended spill_write_ended spill_read_ended disk_stalled process_died node_died "
            "nodes_placed tick",
        )
    },
    "owner": {
        "": (
            ObjectTable,
            "create put_inline put_stored put_in_place abandon bury discard unmap when_freed "
            "cancel_when_freed set_inline set_stored set_locations hint_locations may_be_left_at wait_ready "
            "wait_local remove_waiter fail_all on_opened on_disk on_store_error on_replica on_object_get "
            "on_object_ready process_died",
        ),
        "refs": (
            ReferenceCounter,
            "ref_deserialized adopt_returned_ref remove_local_ref send_after_acks end_protection pledge_to "
            "withdraw_pledge add_borrows_in_reply on_borrow_ack on_borrow_ask on_borrow_add on_borrow_take "
            "on_borrow_drop on_borrow_end",
        ),
        "hints": (ValueHints, "read"),
        "pins": (
            ObjectPins,
            "use_neighbors add_neighbors met begin_file end_file file_failed begin_read end_read begin_view "
            "begin_write give_up",
        ),
        "recovery": (
            ObjectRecovery,
            "on_object_lost resident_lost resident_moved neighbor_lost settle_lost keep_task recount_args "
            "mark_node_dead node_died replicate on_add_location",
        ),
        "copies": (KeptCopies, "hand_over keep keep_error written node_left found node_died"),
        "lineage": (Lineage, "run_begun expect run_made take_expected run_ended forbid trim"),
        "replicas": (Replication, "take_failure"),
    },
}
"""For each core, the methods of its parts that take inputs. The signatures have the types of their arguments."""
_OTHER_TYPES: dict[str, Any] = {
    "begin_read": tuple[list[bytes]],
    "end_read": tuple[list[bytes]],
    "send_after_acks": tuple[bytes, Opaque],
}
"""Where a signature does not have the types in a record; the first two are a list's own methods."""
_STORES = ("meet", "send", "leave")
"""The methods of `NeighborStores`."""


class Input(msgspec.Struct, array_like=True):
    """One input: the method, its packed arguments, and the digest and the beginning of the effects it had.

    depth, anchor: of an input that came while the core handled another one: the nesting depth, and the effect of the
    outer input. facts: what the core read that is not its own, by id.
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

    made: the arguments of `make`. forgotten: number of inputs that are missing. proc: of an owner, its process.
    """

    core: str
    node: int
    made: dict[str, Any]
    inputs: list[Input] = []
    forgotten: int = 0
    proc: bytes = b""


class _Frame:
    """One input that is being handled. anchor: the effect during which others may come."""

    __slots__ = ("anchor", "effects", "given", "times")

    def __init__(self, given: Input) -> None:
        self.given = given
        self.effects: list[Any] = []
        self.times: dict[bytes, int] = {}
        self.anchor = b""

    def add(self, effect: tuple[Any, ...]) -> None:
        self.effects.append(effect)
        key = digest([effect])
        count = self.times[key] = self.times.get(key, 0) + 1
        self.anchor = key + count.to_bytes(4, "big")


class Recorder:
    """Notes the inputs of one core.

    Args:
        core: a key of `inputs_of`. node: where it runs. made: the arguments of `make`. proc: of an owner, its process.
        playback: where the recorder serves a replay: it gives nested inputs and facts, instead of noting them.
    """

    def __init__(
        self, core: str, node: int, made: dict[str, Any], proc: bytes = b"", playback: _Playback | None = None
    ) -> None:
        self.record = Record(core, node, made, [], proc=proc)
        self._playback = playback
        self._inside = False  # the core itself is at work: its calls of its own methods are no inputs
        self._frames: list[_Frame] = []
        self._bytes = 0
        # Weak: a waiter keeps its number while any object or thread may name it, and no longer.
        self._numbers: WeakKeyDictionary[Waiter, int] = WeakKeyDictionary()
        self._waiters = 0

    def wrap(self, target: Any, name: str, key: str = "") -> Callable[..., Any]:
        """Note every call of a method from now on; the new method, which its object has already.

        Args:
            key: the name in the record, where that is not the method's.
        """
        method = getattr(target, name)
        key = key or name

        def noted(*args: Any) -> Any:
            if self._inside:
                return method(*args)
            return self._note(key, args, method)

        setattr(target, name, noted)
        return noted

    def outlet(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call of the core's to the outside, noted as an effect of the input that is being handled."""

        def noted(*args: Any) -> Any:
            if not self._inside or not self._frames or self.record.forgotten:
                return call(*args)
            frame = self._frames[-1]
            frame.add((name, *map(self._shown, args)))
            self._inside = False
            try:
                if self._playback is not None:
                    self._playback.play_nested(frame.anchor)
                return call(*args)
            finally:
                self._inside = True

        return noted

    def fact(self, key: bytes, value: Any) -> Any:
        """Note what the core reads that is not its own; in a replay, the value that was noted."""
        if self._playback is not None:
            return self._playback.fact(key, value)
        if self._inside and self._frames:
            given = self._frames[-1].given
            given.facts = [*given.facts, (key, value)]
        return value

    def number(self, waiter: Waiter) -> int:
        """The number of a waiter in this record; 0 where it is not known."""
        if self._playback is not None:
            return self._playback.number(waiter)
        known = self._numbers.get(waiter, 0)
        if not known and not self.record.forgotten:
            self._waiters += 1
            known = self._numbers[waiter] = self._waiters
        return known

    def wrap_all(self, core: Any) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
        """Note every input of a core from now on. Returns its methods, each before and after."""
        replaced = []
        for key in inputs_of(self.record.core):
            part, _, name = key.rpartition(".")
            target = getattr(core, part) if part else core
            replaced.append((getattr(target, name), self.wrap(target, name, key)))
        return replaced

    def _note(self, key: str, args: tuple[Any, ...], method: Callable[..., Any]) -> Any:
        frame = self._begin(key, args)
        self._inside = True
        if frame is None:
            try:
                return method(*args)
            finally:
                self._inside = False
        self._frames.append(frame)
        effects: Any = frame.effects
        try:
            result = method(*args)
            if self.record.core == "owner":
                effects.append(("returned", result if isinstance(result, (bool, list, str)) else None))
            else:
                effects = result
            return result
        except Exception as error:
            frame.effects.append(("raised", type(error).__name__))
            if self.record.core != "owner":  # a defect of the core, which a replay would only repeat
                self.record.inputs.pop()
            raise
        finally:
            self._inside = False
            self._frames.pop()
            frame.given.effects = show(effects)[:SHOWN]
            frame.given.digest = digest(effects)
            self._bytes += len(frame.given.effects)

    def _begin(self, key: str, args: tuple[Any, ...]) -> _Frame | None:
        if self._playback is not None:
            return _Frame(self._playback.redone)
        record = self.record
        full = len(record.inputs) >= MOST_INPUTS or self._bytes >= MOST_BYTES
        if record.forgotten or (full and not self._frames):
            record.forgotten += 1
            self._numbers.clear()
            return None
        plain = _shortened(key, args) if record.core == "owner" else [_keys(value) for value in args]
        packed = msgspec.msgpack.encode(plain, enc_hook=self._packed)  # before: the arguments may be changed
        self._bytes += len(packed)
        anchor = self._frames[-1].anchor if self._frames else b""
        given = Input(key, packed, b"", "", len(self._frames), anchor)
        record.inputs.append(given)
        return _Frame(given)

    def _packed(self, value: Any) -> Any:
        if isinstance(value, Waiter):
            return self.number(value)
        if isinstance(value, deque):
            return list(value)
        if callable(value) or hasattr(value, "leave"):
            return None
        return getattr(value, "_id", None) or value.id  # a ref, or a task

    def _shown(self, value: Any) -> Any:
        """An argument of an effect, the same in every process."""
        if isinstance(value, Waiter):
            return self.number(value)
        if isinstance(value, m.ObjectReady):
            return msgspec.structs.replace(value, value=_short(value.value))
        if isinstance(value, msgspec.Struct):
            return value if isinstance(value, _TABLE_MESSAGES) else _opaque(value)
        if isinstance(value, list):
            return [self._shown(item) for item in value]
        return value.id if hasattr(value, "retries") else value


def _keys(value: Any) -> Any:
    return list(value) if isinstance(value, (dict, set, frozenset)) else value


def _short(value: bytes) -> bytes:
    """A short value itself; a digest of a longer one, and its last byte."""
    if len(value) <= _LONGEST:
        return bytes(value)
    return b"#" + blake2b(value, digest_size=8).digest() + value[-1:]


def _opaque(msg: Any) -> Opaque:
    if isinstance(msg, Opaque):
        return msg
    return Opaque(type(msg).__name__, blake2b(m.encode([msg]), digest_size=8).digest())


def _shortened(key: str, args: tuple[Any, ...]) -> list[Any]:
    """Arguments of an object table's input, as far as they matter."""
    if key == "refs.ref_deserialized":  # the presence of the list matters; it may be long
        return [args[0], None if args[1] is None else []]
    if key == "refs.send_after_acks":
        return [args[0], _opaque(args[1])]
    short: list[Any] = []
    for value in args:
        if isinstance(value, (bytes, bytearray, memoryview)):
            value = _short(bytes(value))
        elif isinstance(value, m.ObjectReady):
            value = msgspec.structs.replace(value, value=_short(value.value))
        short.append(value)
    return short


# ---------------------------------------------------------------- object tables


def record_table(
    me: bytes,
    send: Callable[[bytes, Message], None],
    notify: Callable[[Waiter], None],
    lost: Callable[[bytes, str, str], bytes],
    lineage_limit: int = 1 << 30,
    remake: Callable[[Any], None] | None = None,
    playback: _Playback | None = None,
    **more: Any,
) -> tuple[ObjectTable, Recorder]:
    """An object table whose inputs are recorded, made from the same arguments, and its recorder.

    The methods of this one object are replaced, so a table that is not recorded costs nothing.
    """
    recorder = Recorder("owner", node_of(me), {"limit": lineage_limit}, me, playback)
    out = recorder.outlet

    def noted_lost(oid: bytes, reason: str, why: str) -> bytes:
        blob: bytes = noted_lost_call(oid, reason, why)
        value: bytes = recorder.fact(oid, _short(blob))
        return blob if playback is None else value

    noted_lost_call = out("lost", lost)
    remake = remake and out("remake", remake)
    table = ObjectTable(me, out("send", send), out("notify", notify), noted_lost, lineage_limit, remake, **more)
    _record_waiters(table, recorder)
    _record_task_state(table, recorder)
    recorder.wrap_all(table)
    _record_outlets(table, recorder)
    bury = table.bury

    def bury_each(died: deque[Any]) -> None:
        while died:  # one by one, as more may die meanwhile
            bury(deque([died.popleft()]))

    table.bury = bury_each  # type: ignore[method-assign]
    return table, recorder


def _record_outlets(table: ObjectTable, recorder: Recorder) -> None:
    """Note the calls that the table makes to what it is given later than at its construction."""
    when_freed, use_neighbors = table.when_freed, table.pins.use_neighbors

    def noted_stores(nodes: Iterable[int], stores: Any) -> None:
        outlets = {name: staticmethod(recorder.outlet(name, getattr(stores, name))) for name in _STORES}
        use_neighbors(sorted(nodes), type("RecordedStores", (), outlets)())

    def noted_when_freed(oid: bytes, call: Callable[[], None]) -> None:
        on_free = recorder.outlet("on_free", lambda _: call())
        when_freed(oid, lambda: on_free(oid))

    table.when_freed = noted_when_freed  # type: ignore[method-assign]
    table.pins.use_neighbors = noted_stores  # type: ignore[method-assign]


def _record_waiters(table: ObjectTable, recorder: Recorder) -> None:
    """Note which waiters count down."""
    fire = table._fire

    def noted_fire(entry: Any, waiters: list[Waiter] | None, failed: bool = False) -> None:
        if waiters:
            recorder.outlet("fire", lambda w, f: fire(entry, waiters, failed))(waiters, failed)

    table._fire = noted_fire  # type: ignore[method-assign]


def _record_task_state(table: ObjectTable, recorder: Recorder) -> None:
    """Note what lineage reads of tasks: they are not the table's, and change between its inputs."""
    why_not = table.lineage.why_not

    def noted(task: Any) -> str:
        state = task.retries, task.attempt, bool(task.cancelled)
        then = recorder.fact(task.id, state)
        if then != state:
            task.retries, task.attempt, task.cancelled = then
        return why_not(task)

    table.lineage.why_not = noted  # type: ignore[method-assign]


class _Given:
    """One input and those that came while it was handled, by the effect during which they came."""

    def __init__(self, step: int, given: Input) -> None:
        self.step, self.given = step, given
        self.children: dict[bytes, list[_Given]] = defaultdict(list)
        self.facts: dict[bytes, deque[Any]] = defaultdict(deque)
        for key, value in given.facts:
            self.facts[key].append(value)


def _tree(inputs: list[Input]) -> list[_Given]:
    """The inputs of depth 0, with all others under them."""
    top: list[_Given] = []
    path: list[_Given] = []
    for step, given in enumerate(inputs):
        node = _Given(step, given)
        del path[given.depth :]
        if path:
            path[-1].children[given.anchor].append(node)
        else:
            top.append(node)
        path.append(node)
    return top


class _Enough(Exception):
    """The replay has found as many differences as it was to find."""


class _Playback:
    """Gives the inputs of a record to an object table once more, each when its time comes.

    Attributes:
        redone: the input that is being given, with the effects that it has now.
    """

    def __init__(self, record: Record, done: Replay, most: int) -> None:
        self.redone = Input("", b"", b"", "")
        self._done, self._most = done, most
        self._now: list[_Given] = []
        self._tasks: dict[bytes, TaskStandIn] = {}
        self._waiting: WeakValueDictionary[int, Waiter] = WeakValueDictionary()
        self._numbers: WeakKeyDictionary[Waiter, int] = WeakKeyDictionary()
        self._table, _ = record_table(
            record.proc, lambda dest, msg: None, lambda waiter: None, lambda oid, reason, why: bytes([ERROR]),
            record.made["limit"], Outlet(), self,
        )  # fmt: skip

    def play(self, node: _Given) -> None:
        """Give one input, with all that came while it was handled."""
        given = node.given
        args = _arguments(given, inputs_of("owner")[given.method], self._unpacked)
        self._now.append(node)
        redone = self.redone = Input(given.method, given.args, b"", "")
        try:
            _bound(self._table, given.method)(*args)
        except _Enough:
            raise
        except Exception:
            pass  # it is among the effects
        try:
            for rest in list(node.children.values()):
                for child in rest:
                    self.play(child)  # the effect that caused it does not happen any more, but the input came
        finally:
            self._now.pop()
        self._done.steps += 1
        if redone.digest != given.digest:
            packed = repr(msgspec.msgpack.decode(given.args))
            found = Difference(node.step, given.method, packed[:SHOWN], given.effects, redone.effects)
            self._done.differences.append(found)
            if len(self._done.differences) >= self._most:
                raise _Enough

    def play_nested(self, anchor: bytes) -> None:
        """Give the inputs that came during this effect of the input that is being given."""
        for child in self._now[-1].children.pop(anchor, ()):
            self.play(child)

    def fact(self, key: bytes, default: Any) -> Any:
        """The next value that was noted for this id."""
        facts = self._now[-1].facts[key] if self._now else None
        return facts.popleft() if facts else default

    def number(self, waiter: Waiter) -> int:
        """The number of a waiter in the record."""
        return self._numbers.get(waiter, 0)

    def _waiter(self, number: int) -> Waiter:
        waiter = self._waiting.get(number)
        if waiter is None:
            waiter = self._waiting[number] = Waiter(_NEVER)
            self._numbers[waiter] = number
        return waiter

    def _unpacked(self, kind: type, value: Any) -> Any:
        if kind is Waiter:
            return self._waiter(value)
        if kind is TaskStandIn:
            return self._tasks.setdefault(value, TaskStandIn(value))
        if kind is Outlet:
            return Outlet()
        return deque(value)


def _replay_owner(record: Record, done: Replay, most: int) -> None:
    playback = _Playback(record, done, most)
    try:
        for node in _tree(record.inputs):
            playback.play(node)
    except _Enough:
        pass


class Difference(msgspec.Struct):
    """An input after which a core decided differently this time."""

    step: int
    method: str
    args: str
    then: str
    now: str


class Replay(msgspec.Struct):
    """The result of a replay. steps: inputs that were given again."""

    core: str
    node: int
    steps: int = 0
    differences: list[Difference] = msgspec.field(default_factory=list)
    error: str = ""
    proc: bytes = b""

    @property
    def name(self) -> str:
        """For people."""
        return f"node {self.node} {self.core}{f' {show_proc(self.proc)}' if self.proc else ''}"


def replay(record: Record, most: int = 10, near_sets: NearSets | None = None) -> Replay:
    """Make the core again, give it the same inputs, and compare its decisions.

    Args:
        record: complete from its first input on. most: stop after so many differences; one may cause the next.
        near_sets: of the heads of jobs, see `PlacementGroupScheduler`.
    """
    done = Replay(record.core, record.node, proc=record.proc)
    if record.forgotten:
        done.error = f"its last {record.forgotten} inputs are not in the record, which was full"
    if record.core == "owner":
        _replay_owner(record, done, most)
        return done
    core = make(record, near_sets)
    kinds = inputs_of(record.core)
    for step, given in enumerate(record.inputs):
        args = _arguments(given, kinds[given.method])
        effects = _bound(core, given.method)(*args)
        done.steps += 1
        if digest(effects) != given.digest:
            found = Difference(step, given.method, repr(args)[:SHOWN], given.effects, show(effects)[:SHOWN])
            done.differences.append(found)
            if len(done.differences) >= most:
                break
    return done


@functools.cache
def inputs_of(core: str) -> Mapping[str, Any]:
    """The methods through which a core takes inputs, as `part.method`, with the types of their arguments."""
    return {
        f"{part}.{name}".lstrip("."): _OTHER_TYPES[name]
        if name in _OTHER_TYPES
        else _argument_types(getattr(kind, name))
        for part, (kind, names) in _INPUTS[core].items()
        for name in names.split()
    }


def _argument_types(method: Callable[..., Any]) -> Any:
    hints = get_type_hints(method)
    hints.pop("return", None)
    return tuple[tuple(_recorded_type(name, hint) for name, hint in hints.items())]  # type: ignore[misc]


def _recorded_type(name: str, hint: Any) -> Any:
    """The type of an argument in a record, where msgspec does not know that of the signature."""
    if name == "task" and hint is Any:
        return Union[TaskStandIn, None]
    if hint is NeighborStores or get_origin(hint) is Callable:
        return Outlet
    if get_origin(hint) in (Iterable, Sequence, Collection):
        return list[get_args(hint)[0]]  # type: ignore[misc]
    return hint


def _bound(core: Any, key: str) -> Any:
    """The method that an input names: of the core, or of one of its parts."""
    part, _, name = key.rpartition(".")
    return getattr(getattr(core, part) if part else core, name)


def _arguments(given: Input, kinds: Any, dec_hook: Callable[[Any, Any], Any] | None = None) -> list[Any]:
    packed = msgspec.msgpack.decode(given.args)
    kinds = kinds.__args__
    return [msgspec.convert(value, kind, dec_hook=dec_hook) for value, kind in zip(packed, kinds, strict=False)]


def portion(record: Record, start: int, size: int = 1 << 20) -> Any:
    """The record from input `start` on, about `size` bytes of it, as it travels."""
    inputs, taken = [], 0
    for given in record.inputs[start:]:
        inputs.append(given)
        taken += len(given.args) + len(given.effects)
        if taken >= size:
            break
    return msgspec.to_builtins(msgspec.structs.replace(record, inputs=inputs), builtin_types=(bytes,))


def make(record: Record, near_sets: NearSets | None = None) -> Any:
    """A core in the state before its first input."""
    made: Mapping[str, Any] = record.made
    config = Config(**made["config"])
    if record.core == "head":
        return Gcs(config, near_sets)
    if record.core == "store":
        return ObjectStore(record.node, **made["store"])
    ids = made["gpu_ids"], made.get("device_ids")
    core = LocalLeaseManager(record.node, made["total"], made["cluster_size"], config, *ids)
    core.pool.set_limit(made["limit"], core.pool.limit_reason)
    return core


def show(effects: Any) -> str:
    """Effects as text, for people."""
    return "\n".join(sorted(map(repr, _each(effects))))


def digest(effects: Any) -> bytes:
    """A digest of effects that is the same in every process.

    Neither their order counts, which may be that of a set, nor the order of the keys inside them."""
    text = "\n".join(sorted(repr(_canonical(effect)) for effect in _each(effects)))
    return blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).digest()


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
