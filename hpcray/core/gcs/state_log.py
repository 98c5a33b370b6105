"""The GCS's tables as rows: each changed row is appended to a log for a standby node, or for the job's next run.

The managers note the keys of rows that they change (`DirtyRows`). Once per turn of the head's raylet the rows are read
as they are by then, so five changes of a row in one turn are one entry. `gcs.recovery` reads rows from tables and fills
tables from rows.

Not in the log: what time brings back by itself. Raylets report to a new head what they have and lack, and waits begin
anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from hpcray.common.ids import PROC_BYTES
from hpcray.protocol.messages import ActorSpec, GroupSpec, JobInfo, NodeInfo
from hpcray.protocol.messages.nodes import RowChange

SESSION, NODE, ENDED, SPEC, ACTOR, WATCH, KILLED, FORGOTTEN, GROUP, GROUP_WATCH, GONE, VALUE, ANSWER = range(13)
"""The tables. SESSION: the session's name, and the job. NODE: nodes by index. ENDED: dead processes. SPEC, ACTOR: an
actor's spec, and its state. WATCH: actor and watcher. KILLED: actors killed before they were registered. FORGOTTEN:
dead actors that have left the table. GROUP, GROUP_WATCH: placement groups. GONE: ids of removed groups. VALUE: the
key-value store. ANSWER: replies to queries that have changed something."""
SMALLEST_SNAPSHOT = 1000
"""Log entries below which a snapshot instead is not worthwhile."""
BYTES_PER_PIECE = 8 << 20
ENDED_PROCESSES_KEPT = 100_000
ACTOR_ID = 13
GROUP_ID = 13

RowKey = tuple[int, bytes]


class DirtyRows:
    """Keys of rows that were made, changed or deleted since they were taken last. Nothing is noted until `start`.

    Attributes:
        on: whether keys are noted.
        count: how many changes there have been.
    """

    def __init__(self) -> None:
        self.on = False
        self.count = 0
        self._dirty: dict[RowKey, None] = {}

    def __bool__(self) -> bool:
        return bool(self._dirty)

    def start(self) -> None:
        """Note changes from now on."""
        self.on = True
        self._dirty.clear()

    def add(self, table: int, key: bytes) -> None:
        """Note that this row has changed."""
        if self.on:
            self._dirty[table, key] = None
            self.count += 1

    def take(self) -> list[RowKey]:
        """The noted keys in the order of their first changes; none is left."""
        dirty, self._dirty = self._dirty, {}
        return list(dirty)


class SessionRow(msgspec.Struct, array_like=True):
    """The whole job. run: number of the job's run, counted from 0."""

    session: str
    job: JobInfo | None
    run: int = 0


class NodeRow(msgspec.Struct, array_like=True):
    """One node. epoch: 1 for the first node that died, 2 for the next; 0 while the node lives."""

    info: NodeInfo
    epoch: int = 0
    reason: str = ""


class ActorRow(msgspec.Struct, array_like=True):
    """An actor's state; the row of its spec is another one. Fields as in `actor_manager.Actor`."""

    state: str
    node: int
    worker: bytes
    restarts: int
    reason: str
    error: bytes
    out_of_scope: bool
    complete: bool
    former: list[bytes]
    pid: int = 0
    ip: str = ""
    unavailable: bool = False
    moves: int = 0
    repr_name: str = ""


class GroupRow(msgspec.Struct, array_like=True):
    """One placement group. Fields as in `placement_group_manager.GcsPlacementGroup`."""

    spec: GroupSpec
    state: str
    nodes: list[int]
    reason: str


encode_row = msgspec.msgpack.Encoder().encode
decode_spec = msgspec.msgpack.Decoder(ActorSpec).decode


class StateLog:
    """The log of one GCS.

    Args:
        read_row: the row of a table and key as it is now; None when there is none.
        all_keys: the keys of all rows.
        dirty_rows: where the GCS's managers note what they change.

    Attributes:
        dirty_rows: likewise.
    """

    def __init__(
        self,
        read_row: Callable[[int, bytes], bytes | None],
        all_keys: Callable[[], Iterator[RowKey]],
        dirty_rows: DirtyRows,
    ) -> None:
        self._read_row = read_row
        self._all_keys = all_keys
        self._written = 0
        self._limit = SMALLEST_SNAPSHOT
        self.dirty_rows = dirty_rows

    def snapshot_rows(self) -> list[RowChange]:
        """All rows. From now on `changed_rows` returns what is new."""
        self.dirty_rows.start()
        rows = [RowChange(table, key, self._read_row(table, key)) for table, key in self._all_keys()]
        rows = [change for change in rows if change.row is not None]
        self._written, self._limit = 0, 2 * len(rows) + SMALLEST_SNAPSHOT
        return rows

    def changed_rows(self) -> list[RowChange]:
        """The rows that have changed since the last call, or since `snapshot_rows`."""
        if not self.dirty_rows:
            return []
        found = [RowChange(table, key, self._read_row(table, key)) for table, key in self.dirty_rows.take()]
        self._written += len(found)
        return found

    @property
    def is_long(self) -> bool:
        """Whether more was written since `snapshot_rows` than a new snapshot would have."""
        return self._written > self._limit


def pieces(rows: Iterable[RowChange], size: int = BYTES_PER_PIECE) -> Iterator[list[RowChange]]:
    """The same rows, in lists of about `size` bytes each."""
    part: list[RowChange] = []
    held = 0
    for change in rows:
        part.append(change)
        held += len(change.key) + len(change.row or b"")
        if held >= size:
            yield part
            part, held = [], 0
    if part:
        yield part


class TableSnapshot:
    """The rows of another process's GCS, kept up to date from its log.

    Attributes:
        rows: by table and key.
    """

    def __init__(self) -> None:
        self.rows: dict[RowKey, bytes] = {}
        self._limit = SMALLEST_SNAPSHOT

    def apply(self, changes: Iterable[RowChange], whole: bool = False) -> None:
        """Apply changes. whole: these are all rows, and replace the rows before."""
        if whole:
            self.rows.clear()
        for change in changes:
            if change.row is None:
                self.rows.pop((change.table, change.key), None)
            else:
                self.rows[change.table, change.key] = change.row
        if len(self.rows) > self._limit:
            self._prune()
            self._limit = 2 * len(self.rows) + SMALLEST_SNAPSHOT

    def table(self, table: int) -> Iterator[tuple[bytes, bytes]]:
        """Key and row of every row of a table."""
        return ((key, row) for (at, key), row in self.rows.items() if at == table)

    def _prune(self) -> None:
        """Drop rows that the log never deletes and that matter no more: those of dead watchers, and long dead ones."""
        ended = {key for key, _ in self.table(ENDED)}
        for at, key in [where for where in self.rows if where[0] in (WATCH, GROUP_WATCH)]:
            if key[-PROC_BYTES:] in ended:
                del self.rows[at, key]
        for key in [key for key, _ in self.table(ENDED)][:-ENDED_PROCESSES_KEPT]:
            del self.rows[ENDED, key]
