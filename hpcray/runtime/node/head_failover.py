"""Head failover: when the head dies, or leaves, another raylet becomes the head. That may happen again and again.

The standby is the raylet of the node that runs the program (`--driver-rank`), and no other: without that node there is
nothing to go on with. So there is no election, and no two raylets can both be the successor. Where the program runs on
the head's own node, there is no standby. In a job without a program the head names it (`core.gcs.node_manager`), and
names another only when it has died; it takes over from a silent head only if most nodes have lost that too.

`HeadReplicator` is the head's side: it sends every change of its tables. `HeadStandby` is that of all other raylets:
the successor keeps the rows, and takes over; the others wait for it for a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping
from typing import Any, Protocol, Union

import msgspec

from hpcray.common.config import Config
from hpcray.common.exceptions import StartupError
from hpcray.common.ids import NIL_PROC, RUN_MASK, first_run, node_of, raylet_of
from hpcray.core.effects import Effect, Send
from hpcray.core.gcs.gcs import Gcs, RecoveringGcs
from hpcray.core.gcs.node_manager import NO_NODE, UP, NodeManager, choose_standby, is_majority
from hpcray.core.gcs.placement_group_scheduler import NearSets
from hpcray.core.gcs.recovery import read_roster
from hpcray.core.gcs.state_log import TableSnapshot, pieces
from hpcray.platform.allocation import job_to_ask
from hpcray.platform.journal_file import JournalFile
from hpcray.protocol import messages as m
from hpcray.protocol.messages.nodes import RowChange
from hpcray.protocol.messages.processes import JobInfo, SetJob
from hpcray.runtime.raylet.raylet import Raylet

# ------------------------------------------------------------ state log writer
# The state log of the head: written to the journal for the job's next run, and to the standby (`head_failover`).


Sink = Callable[[list[RowChange], bool], None]
_MAX_LINES = 10
_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(list[RowChange])


class StateLogWriter:
    """Reads the rows that have changed, once per turn of the head's raylet, and writes them.

    Attributes:
        sinks: each is called with changes, and with whether they are all rows, as they are the first time.
        files: rewritten when they have become long.
    """

    def __init__(self, raylet: Raylet, head: Gcs, is_up: Callable[[], bool]) -> None:
        self.sinks: list[Sink] = []
        self.files: list[JournalFile] = []
        self._raylet = raylet
        self._log = head.log
        self._head = head
        self._is_up = is_up
        self._begun = self._resumed_logged = False
        raylet.loop.each_turn.append(self._turn)

    def write_all(self) -> None:
        """Write all rows, at the end of this turn: there is a new reader."""
        self._begun = False

    def _turn(self) -> None:
        if not self._begun:
            if not self._is_up():
                return
            self._begun = True
            self._write(self._log.snapshot_rows(), True)
            if not self._resumed_logged:
                self._resumed_logged = True
                log_resumed(self._raylet, self._head)
        elif self._log.dirty_rows:
            self._write(self._log.changed_rows(), False)
            if self._log.is_long and self.files:
                for file in self.files:
                    file.rewrite(_records(self._log.snapshot_rows()))

    def _write(self, rows: list[RowChange], whole: bool) -> None:
        for sink in self.sinks:
            sink(rows, whole)
        for file in self.files:
            if whole:
                file.rewrite(_records(rows))
            else:
                file.append(_encode(rows))


def open_journal(config: Config, environ: Mapping[str, str], warn: Callable[[str], None]) -> JournalFile | None:
    """Open the journal on disk that the settings name; None without one.

    Raises:
        StartupError: it cannot be used.
    """
    if not config.journal_dir:
        return None
    job = job_to_ask(environ)
    if "%j" in config.journal_dir and not job:
        raise StartupError(f"HPCRAY_JOURNAL_DIR={config.journal_dir}: this is no Slurm job, so there is no %j")
    return JournalFile(config.journal_dir.replace("%j", job), warn)


def check_journal(config: Config, environ: MutableMapping[str, str], rank: int) -> None:
    """Check, before other ranks wait for this one, that the journal can be opened and read.

    Raises:
        StartupError: the journal cannot be used.
    """
    file = open_journal(config, environ, lambda text: None) if rank == 0 else None
    if file is not None:
        try:
            read_back(file)
        finally:
            file.close()


def read_back(file: JournalFile) -> TableSnapshot | None:
    """Return the rows of an earlier run; None where there was none. A trial GCS has restored them all.

    Raises:
        StartupError: the file is no journal of this version.
    """
    replica, trial = TableSnapshot(), Gcs(Config())
    try:
        for record in file.read():
            replica.apply(_decoder.decode(record))
        trial.begin_run(0, replica)
        trial.handle(0.0, NIL_PROC, SetJob(JobInfo("", "", (), "")))
    except (msgspec.DecodeError, LookupError, ValueError, TypeError, OverflowError) as error:
        raise StartupError(
            f"the journal in {file.path} is damaged, or of another version of hpcray "
            f"({type(error).__name__}: {error}); hint: remove it"
        ) from None
    return replica if replica.rows else None


def _records(rows: list[RowChange]) -> list[bytes]:
    return [_encode(piece) for piece in pieces(rows)]


def log_resumed(raylet: Raylet, head: Gcs) -> None:
    """Print what came back from an earlier run, and what did not."""
    found = head.resumed
    if found is None:
        return
    raylet.log(
        f"from the journal of an earlier run: {found.actors} detached actors, {found.groups} detached placement "
        f"groups, {found.values} values"
    )
    for text in found.lost[:_MAX_LINES]:
        raylet.log(f"not brought back: {text}")
    if len(found.lost) > _MAX_LINES:
        raylet.log(f"nor {len(found.lost) - _MAX_LINES} more")


# ------------------------------------------------------------ head failover


NEW_HEAD_TIMEOUT = 2.0
"""Seconds after `head_timeout` that a node which has lost the head waits for the successor."""
REPLIES_KEPT = 5.0
"""Seconds that the standby keeps a reply of the head: later it has arrived, or is lost with the head."""
DISMISSED = 0
"""Instead of a serial number in a StateLogAck: this node is not the standby any more."""
LOCK_RETRY = 10.0
"""Seconds between two attempts of a new head to lock the journal on disk."""
_NOTHING: tuple[()] = ()
_ALL_FRAMES = 1 << 62
JournalOpener = Callable[[], Union[JournalFile, None]]


class HeadReplicator:
    """The head's side: sends the changes of its tables to the standby, and holds back replies until it has them.

    Args:
        head: the GCS, or what stands before it.
        node_manager: its heartbeats carry how many of a node's frames the standby knows.
        writer: of the state log.
        leaving: returns the nodes that are about to leave.
    """

    def __init__(
        self,
        raylet: Raylet,
        head: Gcs | RecoveringGcs,
        node_manager: NodeManager,
        writer: StateLogWriter,
        leaving: Callable[[], Container[int]] = tuple,
    ) -> None:
        self._raylet = raylet
        self._head = head
        self._dirty_rows = (head.gcs if isinstance(head, RecoveringGcs) else head).log.dirty_rows
        self._node_manager = node_manager
        self._writer = writer
        self._leaving = leaving
        self._standby = NO_NODE
        self._dismissed = NO_NODE  # was the standby; until it knows that it is none any more, there is no other
        self._has_rows = False
        self._serial = 0
        self._sent_at = 0.0
        self._taken: dict[int, int] = {}
        self._settled: dict[int, int] = {}
        self._unacknowledged: deque[tuple[int, dict[int, int]]] = deque()
        self._held_replies: deque[tuple[int, Send]] = deque()
        self._new_replies: list[tuple[bytes, m.GcsReply]] = []
        self._hand_over_at: tuple[int, m.HeadLost] | None = None
        node_manager.settled_counts.append(lambda node: self._settled_frames().get(node, 0))
        writer.sinks.append(self.append)
        raylet.registrar = self
        raylet.loop.each_turn.append(self._turn)

    def choose(self) -> None:
        """Have a standby, if there can be one; called when nodes have come or gone."""
        ready, context = self._node_manager.ready(), self._raylet.context
        living = {info.index for info in ready}
        if self._dismissed in living:
            return
        self._dismissed = NO_NODE
        standby = choose_standby(ready, self._raylet.node, context.driver_rank, self._leaving(), self._standby)
        if standby == self._standby:
            return
        if self._standby in living:
            self._dismissed, standby = self._standby, NO_NODE
        self._standby, self._has_rows = standby, False
        self._settled = self._settled_frames()
        self._unacknowledged.clear()
        held, self._new_replies = [effect for _, effect in self._held_replies], []
        self._held_replies.clear()
        self._raylet.apply(self._node_manager.announce_standby(standby))
        self._raylet.apply(held)
        if standby != NO_NODE:
            self._writer.write_all()

    def append(self, rows: list[m.RowChange], whole: bool) -> None:
        """Send changes of the head's tables, with the number of each node's frames that they include."""
        if self._standby == NO_NODE:
            return
        self._serial += 1
        self._sent_at = self._raylet.loop.now
        self._taken = dict(self._raylet.router.to_head.taken)
        self._unacknowledged.append((self._serial, self._taken))
        replies, self._new_replies = self._new_replies, []
        append = m.StateLogAppend(self._serial, rows, whole, self._taken, replies, self._node_manager.size)
        self._raylet.router.send(raylet_of(self._standby), append)

    def register(self, now: float, src: bytes, msg: m.Message) -> Iterable[Effect]:
        """Handle CreateActor, CreateGroup or GcsCall. A reply to one that changed a table waits for the standby."""
        dirty_rows = self._dirty_rows
        before = dirty_rows.count
        effects = self._head.handle(now, src, msg)
        if dirty_rows.count == before or self._standby == NO_NODE:
            return effects
        others = []
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.msg, m.GcsReply) and effect.msg.req:
                self._held_replies.append((self._serial + 1, effect))
                self._new_replies.append((effect.dest, effect.msg))
            else:
                others.append(effect)
        return others

    def can_hand_over(self) -> bool:
        """Return True if there is a standby that has the tables, or will in a moment."""
        return self._standby != NO_NODE or self._dismissed != NO_NODE

    def hand_over(self, reason: str, kept_at: Iterable[int]) -> None:
        """Have the standby take over, once it has all rows of now. kept_at: see NodeDied."""
        self.append([], False)
        self._hand_over_at = self._serial, m.HeadLost(self._raylet.node, reason, list(kept_at))

    def _settled_frames(self) -> dict[int, int]:
        return self._settled if self._standby != NO_NODE else self._raylet.router.to_head.taken

    def _turn(self) -> None:
        """Report frames that changed no row, a little later."""
        due = self._sent_at + self._raylet.context.config.heartbeat_interval
        if self._has_rows and self._raylet.loop.now >= due and self._raylet.router.to_head.taken != self._taken:
            self.append([], False)

    def on_state_log_ack(self, src: bytes, msg: m.StateLogAck) -> Iterable[Any]:
        """Return the replies that the standby knows of now."""
        ready: list[Effect] = []
        if msg.serial == DISMISSED and node_of(src) == self._dismissed:
            self._dismissed = NO_NODE
            self.choose()
        if msg.serial == DISMISSED or node_of(src) != self._standby:
            return ready
        self._has_rows = True
        while self._unacknowledged and self._unacknowledged[0][0] <= msg.serial:
            self._settled = self._unacknowledged.popleft()[1]
        while self._held_replies and self._held_replies[0][0] <= msg.serial:
            ready.append(self._held_replies.popleft()[1])
        if self._hand_over_at is not None and self._hand_over_at[0] <= msg.serial:
            ready.append(Send(raylet_of(self._standby), self._hand_over_at[1]))
            self._hand_over_at = None
        return ready


class HeadSuccession(Protocol):
    """The methods of its cluster member that a standby calls."""

    def lead(self, head: RecoveringGcs, node_manager: NodeManager, writer: StateLogWriter) -> None:
        """This raylet has become the head."""

    def head_moved(self, now: float, node: int) -> None:
        """Another raylet has become the head."""

    def head_died(self, reason: str, certain: bool | None = None) -> None:
        """The head is lost; certain=None: and no standby will take over."""

    def node_died(self, died: m.NodeDied) -> None:
        """Handle the death of a node."""


class HeadStandby:
    """The side of all raylets but the head's. Does nothing where the program runs on the head's own node.

    Args:
        cluster: leads when this raylet becomes the head.
        open_journal: then opens the journal on disk.
        near_sets: for the new head, see `PlacementGroupScheduler`.
    """

    def __init__(
        self, raylet: Raylet, cluster: HeadSuccession, open_journal: JournalOpener, near_sets: NearSets | None = None
    ) -> None:
        self._raylet = raylet
        self._near_sets = near_sets
        self._cluster = cluster
        self.open_journal = open_journal
        self._driver_rank = self._successor = raylet.context.driver_rank
        self._is_standby = False
        self._replica = TableSnapshot()
        self._taken: dict[int, int] | None = None
        self._numbers = 0
        self._replies: deque[tuple[float, bytes, m.GcsReply]] = deque()
        self._silent_since = 0.0
        self._lost_by: set[int] = set()  # other nodes that have lost the head
        raylet.router.to_head.retaining = raylet.head is None and self._may_move()

    def _may_move(self) -> bool:
        """Return True if another raylet could take over from the present head."""
        return may_have_standby(self._raylet) and self._driver_rank != self._raylet.head_location.node

    def head_lost(self, reason: str, certain: bool) -> bool:
        """Take over from the head, or wait for its successor. Returns whether there is, or may be, a successor.

        Args:
            certain: whether the head's process has ended; else it may only be silent.
        """
        raylet, head_location = self._raylet, self._raylet.head_location
        has_program = self._driver_rank != NO_NODE
        if not self._may_move() or (has_program and self._successor in raylet.router.lost_nodes):
            return False
        if self._taken is not None:
            if certain or (self._silent_for() > 0.0 and (has_program or self._leads_majority())):
                self._take_over(reason)
                return True
            return has_program or self._silent_for() < raylet.context.config.head_timeout + NEW_HEAD_TIMEOUT
        if self._successor == raylet.node:
            return False
        if not head_location.lost:
            head_location.gone()
            epoch = head_location.epoch
            if self._successor not in (NO_NODE, *raylet.router.lost_nodes):
                raylet.router.send(raylet_of(self._successor), m.HeadLost(head_location.node, reason))
            limit = raylet.loop.now + raylet.context.config.head_timeout + NEW_HEAD_TIMEOUT
            raylet.loop.call_at(limit, lambda: self._check_successor(epoch, reason))
        return True

    # ------------------------------------------------------------ while the head lives

    def on_heartbeat(self, src: bytes, msg: m.Heartbeat) -> None:
        """Note a heartbeat of the head, and which of this node's frames need not be retained."""
        if self._may_move() and node_of(src) == self._raylet.head_location.node:
            self._silent_since = 0.0
            self._lost_by.clear()
            self._raylet.router.to_head.settled(msg.settled)
            if self._driver_rank == NO_NODE:
                self._name_successor(src, msg.standby)

    def _name_successor(self, head: bytes, standby: int) -> None:
        """The head has said which node is the standby."""
        me, self._successor = self._raylet.node, standby
        if self._is_standby and standby != me:
            self._replica, self._taken = TableSnapshot(), None
            self._raylet.router.send(head, m.StateLogAck(DISMISSED))
        self._is_standby = standby == me

    def on_state_log_append(self, now: float, src: bytes, msg: m.StateLogAppend) -> Iterable[Any]:
        """Apply changes of the head's tables, on the successor."""
        if not self._may_move():
            return self._raylet.unexpected(now, src, msg)
        if node_of(src) != self._raylet.head_location.node or (self._taken is None and not msg.whole):
            return _NOTHING
        self._replica.apply(msg.changes, msg.whole)
        self._successor = self._raylet.node
        self._taken, self._numbers = msg.taken, msg.numbers
        self._replies.extend((now, dest, reply) for dest, reply in msg.answers)
        while self._replies and self._replies[0][0] < now - REPLIES_KEPT:
            self._replies.popleft()
        return [Send(src, m.StateLogAck(msg.serial))]

    def on_head_lost(self, now: float, src: bytes, msg: m.HeadLost) -> Iterable[Any]:
        """Another node cannot reach the head: the successor probes it. The head itself: it hands over."""
        head_location = self._raylet.head_location
        if self._successor != self._raylet.node:
            return self._raylet.unexpected(now, src, msg)
        if head_location.node != msg.node or msg.node == self._raylet.node:
            return _NOTHING
        if node_of(src) == msg.node:
            if msg.kept_at:
                self._raylet.router.kept_at[msg.node] = msg.kept_at
            self._cluster.head_died(msg.reason, True)
            return _NOTHING
        self._lost_by.add(node_of(src))
        return [Send(raylet_of(msg.node), m.Ping(self._raylet.node))]  # fails at once if it is dead

    # ------------------------------------------------------------ when it is dead

    def _silent_for(self) -> float:
        """Return for how long a head that is only cut off must have ended the job there, as it has declared this node
        dead; negative: it need not have."""
        config, now = self._raylet.context.config, self._raylet.loop.now
        self._silent_since = self._silent_since or now - config.head_timeout
        return now - self._silent_since - config.node_timeout - 2 * config.heartbeat_interval

    def _leads_majority(self) -> bool:
        """Return whether so many nodes have lost the head that it has ended with those that have not."""
        roster = read_roster(self._replica)
        return is_majority(len(self._lost_by) + 1, len(roster.infos) - len(roster.dead))

    def _take_over(self, reason: str) -> None:
        raylet = self._raylet
        now, head_location, config, me = raylet.loop.now, raylet.head_location, raylet.context.config, raylet.node
        head_location.gone()
        head = RecoveringGcs(config, self._near_sets)
        roster = head.take_over(now, self._replica, head_location.node)
        size = max(raylet.context.cluster_size, self._numbers)
        node_manager = NodeManager(size, roster.session, config, now, me, driver_rank=self._driver_rank)
        node_manager.resume(now, roster.infos, roster.dead, raylet.run_info, raylet.router.kept_at)
        old = head_location.node
        unlogged = raylet.forgotten_nodes - roster.dead.keys()
        died = node_manager.node_failed(now, old, reason)
        self._announce_head(node_manager, old)
        for node, why in list(raylet.router.lost_nodes.items()):
            died += node_manager.node_failed(now, node, why)  # in the old head's last moment
        to_head, taken = raylet.router.to_head, self._taken or {}
        to_head.retaining = False
        to_head.taken = {**taken, me: to_head.sent}
        self._replica, self._taken = TableSnapshot(), None
        raylet.log("this node is the head from now on")
        raylet.head = head
        writer = StateLogWriter(raylet, head.gcs, lambda: not head.awaited)
        self._cluster.lead(head, node_manager, writer)
        head_location.moved_to(me, head_location.epoch + 1, taken.get(me, 0))
        to_head.settled(_ALL_FRAMES)
        raylet.apply(effect for effect in died if not _is_death_of(old, effect))  # NewHead carries it
        for node in sorted(unlogged):  # declared dead by the old head, and missing only in the replica
            raylet.apply(head.node_died(now, node, raylet.router.lost_nodes[node]))
        self._open_log(writer)

    def _open_log(self, writer: StateLogWriter, retry: bool = False) -> None:
        """Log to the journal on disk. A file server may hold the lock of a machine that is lost for a while."""
        loop = self._raylet.loop
        try:
            file = self.open_journal()
        except StartupError as error:
            if not retry:
                self._raylet.log(f"no journal is kept for now: {error}")
            loop.call_at(loop.now + LOCK_RETRY, lambda: self._open_log(writer, True))
            return
        if file is not None:
            writer.files.append(file)
            writer.write_all()

    def _announce_head(self, node_manager: NodeManager, old: int) -> None:
        """Send NewHead to all living nodes, with the number of their frames that are known here, and other deaths."""
        raylet, taken = self._raylet, self._taken or {}
        deaths = {died.node: died for died in node_manager.deaths()}
        last, others = deaths.pop(old), deaths.values()
        for node in node_manager.alive():
            if node != raylet.node:
                term = raylet.head_location.epoch + 1
                raylet.router.send(raylet_of(node), m.NewHead(raylet.node, term, taken.get(node, 0), last))
                for other in others:
                    raylet.router.send(raylet_of(node), other)
        for _, proc, reply in self._replies:  # before these requests are repeated: the first reply counts
            raylet.router.send(proc, reply)

    def on_new_head(self, now: float, src: bytes, msg: m.NewHead) -> Iterable[Any]:
        """Follow the successor of the head, which this node declares dead too."""
        if not may_have_standby(self._raylet):
            return self._raylet.unexpected(now, src, msg)
        router, head_location = self._raylet.router, self._raylet.head_location
        if msg.node == node_of(src) and msg.term > head_location.epoch:
            head_location.gone()
            router.send_now(msg.died.node, msg.died)  # the old head may live: a NodeDied that reaches it ends it
            self._replica, self._taken, self._is_standby = TableSnapshot(), None, False
            self._silent_since = 0.0
            self._lost_by.clear()
            self._cluster.head_moved(now, msg.node)
            self._cluster.node_died(msg.died)
            head_location.moved_to(msg.node, msg.term, msg.taken)
            router.to_head.retaining = self._may_move()
        return _NOTHING

    def _check_successor(self, epoch: int, reason: str) -> None:
        location = self._raylet.head_location
        if location.lost and location.epoch == epoch:
            why = "no node took over" if self._successor == NO_NODE else f"node {self._successor} did not take over"
            self._cluster.head_died(f"{reason}, and {why}")


def keep_state_log(raylet: Raylet, node_manager: NodeManager, file: JournalFile | None) -> StateLogWriter | None:
    """On the head of a new job: begin its run, and log the state of the GCS for the next run and for a standby.

    Args:
        file: the journal on disk, if there is to be one.

    Returns:
        None where there is no reader of it.

    Raises:
        StartupError: the journal of an earlier run cannot be read.
    """
    head = raylet.head
    assert isinstance(head, Gcs)
    number = node_manager.run.restarts or first_run(node_manager.session)
    number = head.begin_run(number, read_back(file) if file is not None else None)
    node_manager.begin_run(number & RUN_MASK)
    if file is None and not may_have_standby(raylet):
        return None
    writer = StateLogWriter(raylet, head, lambda: node_manager.state == UP and not head.waits_for_resume)
    writer.files += [] if file is None else [file]
    return writer


def may_have_standby(raylet: Raylet) -> bool:
    """Return True if the head of this job can ever move: the program, if there is one, runs on another node."""
    return raylet.context.driver_rank != 0


def _is_death_of(node: int, effect: Any) -> bool:
    return isinstance(effect, Send) and isinstance(effect.msg, m.NodeDied) and effect.msg.node == node
