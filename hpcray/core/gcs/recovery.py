"""Rows from the GCS's tables, and the tables of a fresh GCS from the rows of another one.

A restored GCS has what the other one had and decides as it would have, except for times (how long a request has waited)
and for what raylets report anyway: what is free, and who lacks what.

The next run of a job takes over (`resume_job`) from the state log of the run before: detached actors with their names,
detached placement groups, and the key-value store. Processes and objects are gone with the run. So an actor begins anew
with its constructor's arguments, where these are all that it takes; its id is a new one. Actors that cannot come back
are listed with the reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import msgspec

from hpcray.common.ids import PROC_BYTES, RUN_MASK, node_of, raylet_of
from hpcray.common.labels import node_affinity
from hpcray.common.resources import group_of
from hpcray.core.gcs import state_log as rows
from hpcray.core.gcs.actor_manager import DEAD, FORMER_WORKERS_KEPT, Actor, ActorManager
from hpcray.core.gcs.cluster_resources import ClusterResources
from hpcray.core.gcs.placement_group_manager import REMOVED, GcsPlacementGroup, PlacementGroupManager
from hpcray.core.gcs.query_service import QueryService
from hpcray.core.gcs.state_log import (
    ACTOR_ID,
    GROUP_ID,
    ActorRow,
    DirtyRows,
    GroupRow,
    NodeRow,
    SessionRow,
    TableSnapshot,
    decode_spec,
    encode_row,
)
from hpcray.protocol import messages as m
from hpcray.protocol.messages import ActorSpec, CreateActor, CreateGroup, GcsCall, Message, Shape

RESTORED_ATTEMPT = 1 << 20
"""Number of a restored group's last attempt: above all that another head has made."""


class GcsTables(msgspec.Struct, frozen=True):
    """The parts of a GCS that have rows."""

    resources: ClusterResources
    actors: ActorManager
    groups: PlacementGroupManager
    queries: QueryService


class TableReader:
    """Reads the rows of a GCS by table and key.

    Args:
        tables: where rows are.
        session_row: the row of the session.
    """

    def __init__(self, tables: GcsTables, session_row: Callable[[], SessionRow]) -> None:
        self._tables = tables
        actors, groups, queries = tables.actors, tables.groups, tables.queries
        lookups = actors.pending_lookups
        self._readers: dict[int, Callable[[bytes], bytes | None]] = {
            rows.SESSION: lambda key: encode_row(session_row()),
            rows.NODE: self._node,
            rows.ENDED: lambda key: b"" if key in lookups.dead_creators else None,
            rows.SPEC: self._spec,
            rows.ACTOR: self._actor,
            rows.WATCH: self._watch,
            rows.KILLED: self._killed,
            rows.FORGOTTEN: lambda key: b"" if key in lookups.forgotten else None,
            rows.GROUP: self._group,
            rows.GROUP_WATCH: self._group_watch,
            rows.GONE: lambda key: b"" if groups.in_removed_ids(key.hex()) else None,
            rows.VALUE: queries.kv.row,
            rows.ANSWER: queries.replies.row,
        }

    def read_row(self, table: int, key: bytes) -> bytes | None:
        """A row as it is now; None when there is none."""
        return self._readers[table](key)

    def all_keys(self) -> Iterator[rows.RowKey]:
        """The keys of all rows."""
        actors, groups, queries = self._tables.actors, self._tables.groups, self._tables.queries
        lookups = actors.pending_lookups
        yield rows.SESSION, b""
        yield from ((rows.NODE, info.index.to_bytes(2, "big")) for info in queries.infos)
        yield from ((rows.ENDED, proc) for proc in lookups.dead_creators)
        for ident, actor in actors.actors.items():
            yield rows.SPEC, ident
            yield rows.ACTOR, ident
            yield from ((rows.WATCH, ident + proc) for proc in actor.watchers)
        for ident, lookup in lookups.pending.items():
            yield from ((rows.WATCH, ident + proc) for proc in lookup.watchers)
            yield rows.KILLED, ident
        yield from ((rows.FORGOTTEN, ident) for ident in lookups.forgotten)
        for group in groups.all_groups():
            yield rows.GROUP, group.spec.group
            yield from ((rows.GROUP_WATCH, group.spec.group + proc) for proc in group.watchers)
        for ident, procs in groups.early_watchers().items():
            yield from ((rows.GROUP_WATCH, ident + proc) for proc in procs)
        yield from ((rows.GONE, bytes.fromhex(group)) for group in groups.removed_ids())
        yield from ((rows.VALUE, key) for key in queries.kv.row_keys())
        yield from ((rows.ANSWER, key) for key in queries.replies.row_keys())

    def _node(self, key: bytes) -> bytes | None:
        node = int.from_bytes(key, "big")
        info = next((info for info in self._tables.queries.infos if info.index == node), None)
        if info is None:
            return None
        dead = self._tables.resources.dead
        if node not in dead:
            return encode_row(NodeRow(info))
        return encode_row(NodeRow(info, list(dead).index(node) + 1, dead[node]))

    def _spec(self, key: bytes) -> bytes | None:
        actor = self._tables.actors.actors.get(key)
        return None if actor is None else encode_row(actor.spec)

    def _actor(self, key: bytes) -> bytes | None:
        a = self._tables.actors.actors.get(key)
        if a is None:
            return None
        state = (a.state, a.node, a.worker, a.restarts, a.reason, a.error, a.out_of_scope, a.complete)
        return encode_row(ActorRow(*state, list(a.former_workers), a.pid, a.ip, a.unavailable, a.moves, a.repr_name))

    def _watch(self, key: bytes) -> bytes | None:
        ident, proc = key[:ACTOR_ID], key[ACTOR_ID:]
        actors = self._tables.actors
        actor, lookup = actors.actors.get(ident), actors.pending_lookups.pending.get(ident)
        watchers = actor.watchers if actor is not None else lookup.watchers if lookup is not None else ()
        return b"" if proc in watchers else None

    def _killed(self, key: bytes) -> bytes | None:
        lookup = self._tables.actors.pending_lookups.pending.get(key)
        return lookup.killed.encode() if lookup is not None and lookup.killed else None

    def _group(self, key: bytes) -> bytes | None:
        group = self._tables.groups.find(key)
        return None if group is None else encode_row(GroupRow(group.spec, group.state, group.nodes, group.reason))

    def _group_watch(self, key: bytes) -> bytes | None:
        ident, proc = key[:-PROC_BYTES], key[-PROC_BYTES:]
        groups = self._tables.groups
        group = groups.find(ident)
        watchers = group.watchers if group is not None else groups.early_watchers().get(ident, ())
        return b"" if proc in watchers else None


class NodeRoster(msgspec.Struct):
    """The session and its nodes, from the rows.

    Attributes:
        session: the session's name.
        infos: all nodes, dead ones too.
        dead: reasons by node, in the order of the deaths.
        run: number of the job's run.
    """

    session: str
    job: m.JobInfo | None
    infos: list[m.NodeInfo]
    dead: dict[int, str]
    run: int = 0


def read_roster(snapshot: TableSnapshot) -> NodeRoster:
    """The session and its nodes."""
    found = [msgspec.msgpack.decode(row, type=NodeRow) for _, row in snapshot.table(rows.NODE)]
    infos = sorted((row.info for row in found), key=lambda info: info.index)
    dead = {row.info.index: row.reason for row in sorted(found, key=lambda row: row.epoch) if row.epoch}
    row = snapshot.rows.get((rows.SESSION, b""))
    session = SessionRow("", None) if row is None else msgspec.msgpack.decode(row, type=SessionRow)
    return NodeRoster(session.session, session.job, infos, dead, session.run)


def load_snapshot(tables: GcsTables, now: float, snapshot: TableSnapshot) -> NodeRoster:
    """Put the rows into the tables of a fresh GCS."""
    roster = read_roster(snapshot)
    tables.queries.set_nodes(roster.infos)
    tables.resources.restore_nodes([info for info in roster.infos if info.index not in roster.dead], roster.dead)
    ended = [proc for proc, _ in snapshot.table(rows.ENDED)]
    forgotten = (ident for ident, _ in snapshot.table(rows.FORGOTTEN))
    tables.actors.pending_lookups.restore_ended(forgotten, ended, roster.dead)
    tables.groups.restore_ended((ident.hex() for ident, _ in snapshot.table(rows.GONE)), ended)
    dead = _DeadProcesses(set(ended), roster.dead)
    _load_actors(tables.actors, now, snapshot, dead)
    _load_groups(tables.groups, now, snapshot, dead)
    for key, value in snapshot.table(rows.VALUE):
        tables.queries.kv.restore_row(key, value)
    for key, value in snapshot.table(rows.ANSWER):
        if key[:PROC_BYTES] not in dead.ended and node_of(key) not in dead.nodes:
            tables.queries.replies.restore_row(key, value)
    return roster


class _DeadProcesses(msgspec.Struct, frozen=True):
    """Dead watchers: their rows are filtered here instead of being deleted one by one."""

    ended: set[bytes]
    nodes: dict[int, str]

    def living_watchers(self, snapshot: TableSnapshot, table: int, length: int) -> dict[bytes, set[bytes]]:
        found: dict[bytes, set[bytes]] = {}
        for key, _ in snapshot.table(table):
            ident, proc = key[:length], key[length:]
            if proc not in self.ended and node_of(proc) not in self.nodes:
                found.setdefault(ident, set()).add(proc)
        return found


def _load_actors(manager: ActorManager, now: float, snapshot: TableSnapshot, dead: _DeadProcesses) -> None:
    watchers = dead.living_watchers(snapshot, rows.WATCH, ACTOR_ID)
    for ident, encoded in snapshot.table(rows.ACTOR):
        row = msgspec.msgpack.decode(encoded, type=ActorRow)
        actor = Actor(
            decode_spec(snapshot.rows[rows.SPEC, ident]),
            row.state, row.node, row.worker, row.pid, row.ip, row.repr_name, row.unavailable, row.restarts,
            row.moves, row.reason, row.error,
            watchers=watchers.get(ident, set()) if row.state != DEAD else set(),
            out_of_scope=row.out_of_scope, complete=row.complete, since=now if row.state != DEAD else 0.0,
            former_workers=deque(row.former, FORMER_WORKERS_KEPT), sent_at=now,
        )  # fmt: skip
        manager.restore_actor(actor)
    lookups = manager.pending_lookups
    for ident, procs in watchers.items():
        if ident not in manager.actors and lookups.may_come(ident):
            lookups.lookup_of(ident).watchers |= procs
    for ident, reason in snapshot.table(rows.KILLED):
        if ident not in manager.actors and lookups.may_come(ident):
            lookups.lookup_of(ident).killed = reason.decode()


def _load_groups(manager: PlacementGroupManager, now: float, snapshot: TableSnapshot, dead: _DeadProcesses) -> None:
    watchers = dead.living_watchers(snapshot, rows.GROUP_WATCH, GROUP_ID)
    for ident, encoded in snapshot.table(rows.GROUP):
        row = msgspec.msgpack.decode(encoded, type=GroupRow)
        group = GcsPlacementGroup(
            row.spec, row.state, row.nodes, attempt=RESTORED_ATTEMPT, since=now, reported_at=now, reason=row.reason,
            watchers=watchers.get(ident, set()) if row.state != REMOVED else set(),
        )  # fmt: skip
        manager.restore_group(group)
    for ident, procs in watchers.items():
        if manager.find(ident) is None and not manager.is_removed(ident.hex()):
            manager.early_watchers().setdefault(ident, set()).update(procs)


_QUERIES_OF_RESUMED = ("named_actor", "list_named_actors", "placement_group", "kv_")
"""Prefixes of queries about what may come back."""
_REFS = (b"placed_ref", b"ObjectRef", b"ActorHandle", b"PlacementGroup")
_LIVE = (b"placed_ref",)
"""Byte strings in pickled arguments, and in a pickled class, that refer to something of the run that is over."""
_COUNTER_BITS = 24
"""Bits of the counter in an id that a raylet makes. The run's number stands before the counter, as raylets have the
same process id in every run."""


class Resumed(msgspec.Struct):
    """Result of `resume_job`.

    Attributes:
        actors, groups, values: how many came back.
        lost: one line for each actor that did not come back, with the reason.
    """

    actors: int = 0
    groups: int = 0
    values: int = 0
    lost: list[str] = msgspec.field(default_factory=list)


def resume_job(tables: GcsTables, dirty_rows: DirtyRows, now: float, snapshot: TableSnapshot, run: int) -> Resumed:
    """Put what outlives a run into the tables of a GCS whose cluster has just come up.

    Args:
        snapshot: the tables of the run before.
        run: number of this run.
    """
    found, ids = Resumed(), _NewIds(run)
    for ident, encoded in snapshot.table(rows.GROUP):
        row = msgspec.msgpack.decode(encoded, type=GroupRow)
        if row.state != REMOVED and not row.spec.owner:
            spec = msgspec.structs.replace(row.spec, group=ids.make(ident))
            tables.groups.restore_group(
                GcsPlacementGroup(spec, nodes=[-1] * len(spec.bundles), since=now, reported_at=now)
            )
            dirty_rows.add(rows.GROUP, spec.group)
            found.groups += 1
    for ident, encoded in snapshot.table(rows.ACTOR):
        state = msgspec.msgpack.decode(encoded, type=ActorRow)
        old = decode_spec(snapshot.rows[rows.SPEC, ident])
        if state.state == DEAD or not old.detached:
            continue
        if reason := _why_not(old, state, ids):
            found.lost.append(f"{old.class_name} {old.name!r}: {reason}")
            continue
        new = msgspec.structs.replace(
            old, actor=ids.make(ident), place=_translated(old.place, ids), hold=_translated(old.hold, ids)
        )
        tables.actors.restore_actor(Actor(new, since=now))
        dirty_rows.add(rows.SPEC, new.actor)
        found.actors += 1
    for key, value in snapshot.table(rows.VALUE):
        tables.queries.kv.restore_row(key, value)
        dirty_rows.add(rows.VALUE, key)
        found.values += 1
    return found


def waits_for_resume(msg: Message) -> bool:
    """Whether a message is handled only after the former run's actors, groups and values are back."""
    if isinstance(msg, GcsCall):
        return msg.method.startswith(_QUERIES_OF_RESUMED)
    return isinstance(msg, (CreateActor, CreateGroup))


class _NewIds:
    """New ids by old ones. Their maker is the raylet of node 0: reports of waiting actors go to it. Raylets make no
    other ids."""

    def __init__(self, run: int) -> None:
        self._first = (run & RUN_MASK) << _COUNTER_BITS
        self._new: dict[bytes, bytes] = {}

    def make(self, old: bytes) -> bytes:
        return self._new.setdefault(old, raylet_of(0) + (self._first + len(self._new) + 1).to_bytes(5, "big"))

    def get(self, old: str) -> str | None:
        """The new id of an old one, both in hex; None for what has not come back."""
        new = self._new.get(bytes.fromhex(old))
        return None if new is None else new.hex()


def _why_not(spec: ActorSpec, row: ActorRow, ids: _NewIds) -> str:
    """Why an actor does not come back; "" when it does."""
    if not row.complete:
        return "its constructor's arguments were not there yet"
    if row.out_of_scope:
        return "all handles to it were gone"
    if spec.refs:
        return "its constructor takes large arguments, which were in the memory of the nodes"
    if _has(_REFS, spec.args, *(spec.inline or ())) or _has(_LIVE, spec.cls):
        return "its constructor takes refs or handles, which were of that run"
    group = group_of(spec.place.resources) or group_of(spec.hold.resources)
    if group and ids.get(group) is None:
        return "its placement group does not come back"
    return ""


def _translated(shape: Shape, ids: _NewIds) -> Shape:
    """The same request in this run: without affinity to a node of the former run, and with the groups' new ids."""
    strategy = "" if node_affinity(shape.strategy) is not None else shape.strategy
    group = group_of(shape.resources)
    if not group:
        return msgspec.structs.replace(shape, strategy=strategy)
    new = ids.get(group) or group
    resources = tuple(sorted((name.replace(group, new), units) for name, units in shape.resources))
    return msgspec.structs.replace(shape, resources=resources, strategy=strategy)


def _has(words: Iterable[bytes], *texts: bytes) -> bool:
    return any(word in text for word in words for text in texts)
