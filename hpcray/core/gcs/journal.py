"""What the head must not lose, as rows: each change of a row is written down for a standby, or for the job's next run.

The cores only note the keys of rows that they have changed (`Notes`), wherever that happens. Once per turn the rows are
read, as they are by then: what changed five times in a turn is written once. `gcs.restoring` makes a head of rows.

Not written: what time brings back by itself. What raylets have and lack they tell a new head, and who waits for a place
waits from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from hpcray.base.ids import PROC_BYTES
from hpcray.core.gcs import notes
from hpcray.core.gcs.actors import ActorTable
from hpcray.core.gcs.notes import Notes
from hpcray.core.gcs.placement_groups import PlacementGroups
from hpcray.core.gcs.queries import Queries
from hpcray.core.scheduler.placement import ClusterView
from hpcray.wire.messages import ActorSpec, GroupSpec, JobInfo, NodeInfo
from hpcray.wire.messages.succession import Change

if TYPE_CHECKING:
    from hpcray.core.gcs.head import HeadCore

LEAST = 1000
"""A log of so many changes is not worth a snapshot."""
PIECE = 8 << 20
ENDED_KEPT = 100_000
ACTOR_ID = 13
GROUP_ID = 13


class SessionRow(msgspec.Struct, array_like=True):
    """Of the whole job."""

    session: str
    job: JobInfo | None


class NodeRow(msgspec.Struct, array_like=True):
    """One node. epoch: number of its death, 0 while it lives."""

    info: NodeInfo
    epoch: int = 0
    reason: str = ""


class ActorRow(msgspec.Struct, array_like=True):
    """How an actor is; what it is stands in the row of its spec. See `gcs.actor`."""

    state: str
    node: int
    worker: bytes
    restarts: int
    reason: str
    error: bytes
    out_of_scope: bool
    complete: bool
    former: list[bytes]


class GroupRow(msgspec.Struct, array_like=True):
    """One placement group. See `gcs.groups`."""

    spec: GroupSpec
    state: str
    nodes: list[int]
    reason: str


encode = msgspec.msgpack.Encoder().encode
decode_spec = msgspec.msgpack.Decoder(ActorSpec).decode


class Tables:
    """Reads the rows of a head core, by table and key."""

    def __init__(
        self, head: HeadCore, view: ClusterView, actors: ActorTable, groups: PlacementGroups, queries: Queries
    ) -> None:
        self._head = head
        self._view = view
        self._actors = actors
        self._groups = groups
        self._queries = queries
        self.notes = actors.notes = groups.notes = queries.kv.notes = queries.answers.notes = Notes()
        self._readers: dict[int, Callable[[bytes], bytes | None]] = {
            notes.SESSION: lambda key: encode(SessionRow(head.session, head.job)),
            notes.NODE: self._node,
            notes.ENDED: lambda key: b"" if key in actors.early.dead_creators else None,
            notes.SPEC: self._spec,
            notes.ACTOR: self._actor,
            notes.WATCH: self._watch,
            notes.KILLED: self._killed,
            notes.FORGOTTEN: lambda key: b"" if key in actors.early.forgotten else None,
            notes.GROUP: self._group,
            notes.GROUP_WATCH: self._group_watch,
            notes.GONE: lambda key: b"" if groups.forgotten(key.hex()) else None,
            notes.VALUE: queries.kv.row,
            notes.ANSWER: queries.answers.row,
        }

    def row(self, table: int, key: bytes) -> bytes | None:
        """A row as it is now; None when there is none."""
        return self._readers[table](key)

    def all_keys(self) -> Iterator[tuple[int, bytes]]:
        """The keys of all rows."""
        actors, early = self._actors.actors, self._actors.early
        yield notes.SESSION, b""
        yield from ((notes.NODE, info.index.to_bytes(2, "big")) for info in self._queries.infos)
        yield from ((notes.ENDED, proc) for proc in early.dead_creators)
        for ident, actor in actors.items():
            yield notes.SPEC, ident
            yield notes.ACTOR, ident
            yield from ((notes.WATCH, ident + proc) for proc in actor.watchers)
        for ident, waiting in early.all().items():
            yield from ((notes.WATCH, ident + proc) for proc in waiting.watchers)
            yield notes.KILLED, ident
        yield from ((notes.FORGOTTEN, ident) for ident in early.forgotten)
        for group in self._groups.all():
            yield notes.GROUP, group.spec.group
            yield from ((notes.GROUP_WATCH, group.spec.group + proc) for proc in group.watchers)
        for ident, procs in self._groups.early().items():
            yield from ((notes.GROUP_WATCH, ident + proc) for proc in procs)
        yield from ((notes.GONE, bytes.fromhex(group)) for group in self._groups.gone_ids())
        yield from ((notes.VALUE, key) for key in self._queries.kv.row_keys())
        yield from ((notes.ANSWER, key) for key in self._queries.answers.row_keys())

    def _node(self, key: bytes) -> bytes | None:
        node = int.from_bytes(key, "big")
        info = next((info for info in self._queries.infos if info.index == node), None)
        if info is None:
            return None
        dead = list(self._view.dead)
        if node not in self._view.dead:
            return encode(NodeRow(info))
        return encode(NodeRow(info, dead.index(node) + 1, self._view.dead[node]))

    def _spec(self, key: bytes) -> bytes | None:
        actor = self._actors.actors.get(key)
        return None if actor is None else encode(actor.spec)

    def _actor(self, key: bytes) -> bytes | None:
        a = self._actors.actors.get(key)
        if a is None:
            return None
        former = list(a.former)
        return encode(
            ActorRow(a.state, a.node, a.worker, a.restarts, a.reason, a.error, a.out_of_scope, a.complete, former)
        )

    def _watch(self, key: bytes) -> bytes | None:
        ident, proc = key[:ACTOR_ID], key[ACTOR_ID:]
        actor, early = self._actors.actors.get(ident), self._actors.early.all().get(ident)
        watchers = actor.watchers if actor is not None else early.watchers if early is not None else ()
        return b"" if proc in watchers else None

    def _killed(self, key: bytes) -> bytes | None:
        early = self._actors.early.all().get(key)
        return early.killed.encode() if early is not None and early.killed else None

    def _group(self, key: bytes) -> bytes | None:
        group = self._groups.find(key)
        return None if group is None else encode(GroupRow(group.spec, group.state, group.nodes, group.reason))

    def _group_watch(self, key: bytes) -> bytes | None:
        ident, proc = key[:-PROC_BYTES], key[-PROC_BYTES:]
        group = self._groups.find(ident)
        watchers = group.watchers if group is not None else self._groups.early().get(ident, ())
        return b"" if proc in watchers else None


class Journal:
    """Of one head core.

    Attributes:
        notes: where the core's tables say what they have changed.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._written = 0
        self._limit = LEAST
        self.notes = tables.notes

    def begin(self) -> list[Change]:
        """All rows. From now on `changes` tells what is new."""
        self.notes.on = True
        self.notes.take()
        rows = [Change(table, key, self._tables.row(table, key)) for table, key in self._tables.all_keys()]
        rows = [change for change in rows if change.row is not None]
        self._written, self._limit = 0, 2 * len(rows) + LEAST
        return rows

    def changes(self) -> list[Change]:
        """The rows that have changed since the last call, or since `begin`."""
        if not self.notes:
            return []
        found = [Change(table, key, self._tables.row(table, key)) for table, key in self.notes.take()]
        self._written += len(found)
        return found

    @property
    def long(self) -> bool:
        """Whether so much was written since `begin` that to begin again is shorter."""
        return self._written > self._limit


def pieces(rows: Iterable[Change], size: int = PIECE) -> Iterator[list[Change]]:
    """The same rows, in lists of about so many bytes each."""
    part: list[Change] = []
    held = 0
    for change in rows:
        part.append(change)
        held += len(change.key) + len(change.row or b"")
        if held >= size:
            yield part
            part, held = [], 0
    if part:
        yield part


class Replica:
    """The rows of another process's head core, kept up to date.

    Attributes:
        rows: by table and key.
    """

    def __init__(self) -> None:
        self.rows: dict[tuple[int, bytes], bytes] = {}
        self._limit = LEAST

    def take(self, changes: Iterable[Change], whole: bool = False) -> None:
        """Take in changes. whole: they are all rows, what was there before is void."""
        if whole:
            self.rows.clear()
        for change in changes:
            if change.row is None:
                self.rows.pop((change.table, change.key), None)
            else:
                self.rows[change.table, change.key] = change.row
        if len(self.rows) > self._limit:
            self._prune()
            self._limit = 2 * len(self.rows) + LEAST

    def of(self, table: int) -> Iterator[tuple[bytes, bytes]]:
        """Key and row of every row of a table."""
        return ((key, row) for (at, key), row in self.rows.items() if at == table)

    def _prune(self) -> None:
        """Take away what matters no more, and is deleted by nobody: who is dead watches nothing."""
        ended = {key for key, _ in self.of(notes.ENDED)}
        for at, key in [where for where in self.rows if where[0] in (notes.WATCH, notes.GROUP_WATCH)]:
            if key[-PROC_BYTES:] in ended:
                del self.rows[at, key]
        for key in [key for key, _ in self.of(notes.ENDED)][:-ENDED_KEPT]:
            del self.rows[notes.ENDED, key]
