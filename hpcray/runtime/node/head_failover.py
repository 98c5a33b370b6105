"""Head failover: when the head dies and the program lives, another raylet becomes the head.

The standby is the raylet of the node that runs the program (`--driver-rank`), and no other: without that node there is
nothing to go on with. So there is no election, and no two raylets can both be the successor. Where the program runs on
the head's own node, there is no standby.

`HeadReplicator` is the head's side: it sends every change of its tables. `HeadStandby` is that of all other raylets:
the successor keeps the rows, and takes over; the others wait for it for a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol, Union

from hpcray.common.exceptions import StartupError
from hpcray.common.ids import RUN_MASK, first_run, node_of, raylet_of
from hpcray.core.effects import Effect, Send
from hpcray.core.gcs.gcs import Gcs, RecoveringGcs
from hpcray.core.gcs.node_manager import UP, NodeManager
from hpcray.core.gcs.state_log import TableSnapshot
from hpcray.platform.journal_file import JournalFile
from hpcray.protocol import messages as m
from hpcray.runtime.node.state_log_writer import StateLogWriter, read_back
from hpcray.runtime.raylet.raylet import Raylet

NEW_HEAD_TIMEOUT = 2.0
"""Seconds after `head_timeout` that a node which has lost the head waits for the successor."""
REPLIES_KEPT = 5.0
"""Seconds that the standby keeps a reply of the head: later it has arrived, or is lost with the head."""
LOCK_RETRY = 10.0
"""Seconds between two attempts of a new head to lock the journal on disk."""
_NOTHING: tuple[()] = ()
_ALL_FRAMES = 1 << 62
JournalOpener = Callable[[], Union[JournalFile, None]]


class HeadReplicator:
    """The head's side: sends the changes of its tables to the standby, and holds back replies until it has them.

    Args:
        node_manager: its heartbeats carry how many of a node's frames the standby knows.
    """

    def __init__(self, raylet: Raylet, head: Gcs, node_manager: NodeManager) -> None:
        self._raylet = raylet
        self._head = head
        self._standby = raylet_of(raylet.context.driver_rank)
        self._serial = 0
        self._sent_at = 0.0
        self._taken: dict[int, int] = {}
        self._settled: dict[int, int] = {}
        self._unacknowledged: deque[tuple[int, dict[int, int]]] = deque()
        self._held_replies: deque[tuple[int, Send]] = deque()
        self._new_replies: list[tuple[bytes, m.GcsReply]] = []
        node_manager.set_settled(lambda node: self._settled.get(node, 0))
        raylet.loop.each_turn.append(self._turn)

    def append(self, rows: list[m.RowChange], whole: bool) -> None:
        """Send changes of the head's tables, with the number of each node's frames that they include."""
        self._serial += 1
        self._sent_at = self._raylet.loop.now
        self._taken = dict(self._raylet.router.to_head.taken)
        self._unacknowledged.append((self._serial, self._taken))
        replies, self._new_replies = self._new_replies, []
        self._raylet.router.send(self._standby, m.StateLogAppend(self._serial, rows, whole, self._taken, replies))

    def register(self, now: float, src: bytes, msg: m.Message) -> Iterable[Effect]:
        """Handle CreateActor, CreateGroup or GcsCall. A reply to one that changed a table waits for the standby."""
        dirty_rows = self._head.log.dirty_rows
        before = dirty_rows.count
        effects = self._head.handle(now, src, msg)
        if dirty_rows.count == before:
            return effects
        others = []
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.msg, m.GcsReply) and effect.msg.req:
                self._held_replies.append((self._serial + 1, effect))
                self._new_replies.append((effect.dest, effect.msg))
            else:
                others.append(effect)
        return others

    def _turn(self) -> None:
        """Report frames that changed no row, a little later."""
        due = self._sent_at + self._raylet.context.config.heartbeat_interval
        if self._serial and self._raylet.loop.now >= due and self._raylet.router.to_head.taken != self._taken:
            self.append([], False)

    def on_state_log_ack(self, msg: m.StateLogAck) -> Iterable[Any]:
        """Return the replies that the standby knows of now."""
        while self._unacknowledged and self._unacknowledged[0][0] <= msg.serial:
            self._settled = self._unacknowledged.popleft()[1]
        ready = []
        while self._held_replies and self._held_replies[0][0] <= msg.serial:
            ready.append(self._held_replies.popleft()[1])
        return ready


class HeadSuccession(Protocol):
    """The methods of its cluster member that a standby calls."""

    def lead(self, head: Gcs, node_manager: NodeManager) -> None:
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
    """

    def __init__(self, raylet: Raylet, cluster: HeadSuccession, open_journal: JournalOpener) -> None:
        self._raylet = raylet
        self._cluster = cluster
        self._open_journal = open_journal
        self._successor = raylet.context.driver_rank
        self._enabled = raylet.head is None and _has_standby(raylet)
        self._is_successor = self._enabled and raylet.node == self._successor
        self._replica = TableSnapshot()
        self._taken: dict[int, int] | None = None
        self._replies: deque[tuple[float, bytes, m.GcsReply]] = deque()
        self._silent_since = 0.0
        raylet.router.to_head.retaining = self._enabled

    def head_lost(self, reason: str, certain: bool) -> bool:
        """Take over from the head, or wait for its successor. Returns whether there is, or may be, a successor.

        Args:
            certain: whether the head's process has ended; else it may only be silent.
        """
        raylet, head_location = self._raylet, self._raylet.head_location
        if not self._enabled or head_location.epoch or self._successor in raylet.router.lost_nodes:
            return False
        if self._is_successor:
            if self._taken is None:
                return False
            if certain or self._silent_for_long():
                self._take_over(reason)
            return True
        if not head_location.lost:
            head_location.gone()
            raylet.router.send(raylet_of(self._successor), m.HeadLost(head_location.node, reason))
            limit = raylet.loop.now + raylet.context.config.head_timeout + NEW_HEAD_TIMEOUT
            raylet.loop.call_at(limit, lambda: self._check_successor(reason))
        return True

    # ------------------------------------------------------------ while the head lives

    def on_heartbeat(self, src: bytes, msg: m.Heartbeat) -> None:
        """Note a heartbeat of the head, and which of this node's frames need not be retained."""
        if self._enabled and node_of(src) == self._raylet.head_location.node:
            self._silent_since = 0.0
            self._raylet.router.to_head.settled(msg.settled)

    def on_state_log_append(self, now: float, src: bytes, msg: m.StateLogAppend) -> Iterable[Any]:
        """Apply changes of the head's tables, on the successor."""
        if not self._is_successor:
            return self._raylet.unexpected(now, src, msg)
        if node_of(src) != self._raylet.head_location.node or (self._taken is None and not msg.whole):
            return _NOTHING
        self._replica.apply(msg.changes, msg.whole)
        self._taken = msg.taken
        self._replies.extend((now, dest, reply) for dest, reply in msg.answers)
        while self._replies and self._replies[0][0] < now - REPLIES_KEPT:
            self._replies.popleft()
        return [Send(src, m.StateLogAck(msg.serial))]

    def on_head_lost(self, now: float, src: bytes, msg: m.HeadLost) -> Iterable[Any]:
        """Another node cannot reach the head: the successor probes it."""
        if not self._is_successor:
            return self._raylet.unexpected(now, src, msg)
        head_location = self._raylet.head_location
        if head_location.node == msg.node and msg.node != self._raylet.node:
            return [Send(raylet_of(msg.node), m.Ping(self._raylet.node))]  # fails at once if it is dead
        return _NOTHING

    # ------------------------------------------------------------ when it is dead

    def _silent_for_long(self) -> bool:
        """Return whether a head that is only cut off has declared this node dead by now, and so ended the job there."""
        config, now = self._raylet.context.config, self._raylet.loop.now
        self._silent_since = self._silent_since or now - config.head_timeout
        return now - self._silent_since > config.node_timeout + 2 * config.heartbeat_interval

    def _take_over(self, reason: str) -> None:
        raylet = self._raylet
        now, head_location, config, me = raylet.loop.now, raylet.head_location, raylet.context.config, raylet.node
        head_location.gone()
        head = RecoveringGcs(config)
        roster = head.take_over(now, self._replica, head_location.node)
        node_manager = NodeManager(raylet.context.cluster_size, roster.session, config, now, me)
        node_manager.resume(now, roster.infos, roster.dead, raylet.run_info)
        old = head_location.node
        unlogged = raylet.forgotten_nodes - roster.dead.keys()
        died = node_manager.node_failed(now, old, reason)
        self._announce_head(node_manager, old)
        for node, why in list(raylet.router.lost_nodes.items()):
            died += node_manager.node_failed(now, node, why)  # in the old head's last moment
        raylet.router.to_head.retaining = False
        self._replica = TableSnapshot()
        raylet.log("this node is the head from now on")
        raylet.head = head
        self._cluster.lead(head.gcs, node_manager)
        head_location.moved_to(me, head_location.epoch + 1, (self._taken or {}).get(me, 0))
        raylet.router.to_head.settled(_ALL_FRAMES)
        raylet.apply(effect for effect in died if not _is_death_of(old, effect))  # NewHead carries it
        for node in sorted(unlogged):  # declared dead by the old head, and missing only in the replica
            raylet.apply(head.node_died(now, node, raylet.router.lost_nodes[node]))
        self._open_log(head.gcs)

    def _open_log(self, head: Gcs, retry: bool = False) -> None:
        """Log to the journal on disk. A file server may hold the lock of a machine that is lost for a while."""
        loop = self._raylet.loop
        try:
            file = self._open_journal()
        except StartupError as error:
            if not retry:
                self._raylet.log(f"no journal is kept for now: {error}")
            loop.call_at(loop.now + LOCK_RETRY, lambda: self._open_log(head, True))
            return
        if file is not None:
            StateLogWriter(self._raylet, head, lambda: True).files.append(file)

    def _announce_head(self, node_manager: NodeManager, old: int) -> None:
        """Send NewHead to all living nodes, with the number of their frames that are known here, and other deaths."""
        raylet, taken = self._raylet, self._taken or {}
        others = [
            m.NodeDied(node, why, at + 1) for at, (node, why) in enumerate(node_manager.dead.items()) if node != old
        ]
        for node in node_manager.alive():
            if node != raylet.node:
                died = (old, node_manager.dead[old], len(node_manager.dead))
                term = raylet.head_location.epoch + 1
                raylet.router.send(raylet_of(node), m.NewHead(raylet.node, term, taken.get(node, 0), *died))
                for other in others:
                    raylet.router.send(raylet_of(node), other)
        for _, proc, reply in self._replies:  # before these requests are repeated: the first reply counts
            raylet.router.send(proc, reply)

    def on_new_head(self, now: float, src: bytes, msg: m.NewHead) -> Iterable[Any]:
        """Follow the successor of the head, which this node declares dead too."""
        if not self._enabled:
            return self._raylet.unexpected(now, src, msg)
        router, head_location = self._raylet.router, self._raylet.head_location
        if msg.node == node_of(src) and msg.term > head_location.epoch:
            head_location.gone()
            old = m.NodeDied(msg.old, msg.reason, msg.epoch)
            router.send_now(msg.old, old)  # the old head may live: a NodeDied that reaches it ends it
            self._cluster.head_moved(now, msg.node)
            self._cluster.node_died(old)
            head_location.moved_to(msg.node, msg.term, msg.taken)
            router.to_head.retaining = False
        return _NOTHING

    def _check_successor(self, reason: str) -> None:
        if self._raylet.head_location.lost:
            self._cluster.head_died(f"{reason}, and node {self._successor} did not take over")


def keep_state_log(raylet: Raylet, node_manager: NodeManager, file: JournalFile | None) -> HeadReplicator | None:
    """On the head of a new job: begin its run, and log the state of the GCS for the next run and for a standby.

    Args:
        file: the journal on disk, if there is to be one.

    Raises:
        StartupError: the journal of an earlier run cannot be read.
    """
    head = raylet.head
    assert isinstance(head, Gcs)
    number = node_manager.run.restarts or first_run(node_manager.session)
    number = head.begin_run(number, read_back(file) if file is not None else None)
    node_manager.begin_run(number & RUN_MASK)
    if file is None and not _has_standby(raylet):
        return None
    writer = StateLogWriter(raylet, head, lambda: node_manager.state == UP and not head.waits_for_resume)
    replicator = None
    if _has_standby(raylet):
        replicator = raylet.registrar = HeadReplicator(raylet, head, node_manager)
        writer.sinks.append(replicator.append)
    if file is not None:
        writer.files.append(file)
    return replicator


def _has_standby(raylet: Raylet) -> bool:
    return raylet.context.driver_rank != 0 and raylet.context.cluster_size > 1


def _is_death_of(node: int, effect: Any) -> bool:
    return isinstance(effect, Send) and isinstance(effect.msg, m.NodeDied) and effect.msg.node == node
