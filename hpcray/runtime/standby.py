"""When the head dies and the program lives: another raylet becomes the head.

That raylet is the one of the node which runs the program (`--driver-rank`). It alone may: where it is gone there is
nothing to go on with, so nobody has to be elected, and no two can believe they were. Where the program runs on the
head's own node, none of this is at work.

`Leading` is the head's side: it sends every change of its tables. `Standby` is that of all others: the program's node
keeps the rows, and takes over; the others wait for it for a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hpcray.base.failures import StartupError
from hpcray.base.ids import node_of, raylet_of
from hpcray.core.effects import Effect, Send
from hpcray.core.gcs.head import HeadCore
from hpcray.core.gcs.journal import Replica
from hpcray.core.gcs.membership import UP, Membership
from hpcray.core.gcs.succession import HANDLES, SuccessorHead
from hpcray.host.journal_file import JournalFile
from hpcray.runtime.journaling import Journaling, read_back
from hpcray.runtime.raylet import Raylet
from hpcray.wire import messages as m

if TYPE_CHECKING:
    from hpcray.runtime.cluster import Cluster

PATIENCE = 2.0
"""Who has lost the head waits for its successor for the time-out of the head, and so much longer."""
ANSWERS_KEPT = 5.0
"""An answer that has not reached who asked within this time, in seconds, is lost with the head, or never."""
LOCK_RETRY = 10.0
"""So often, in seconds, a new head tries to get the journal on disk."""
_ANSWERED = (m.CreateActor, m.CreateGroup, m.GcsCall)
_NOTHING: tuple[()] = ()
_ALL = 1 << 62
Opener = Callable[[], "JournalFile | None"]


class Leading:
    """The head's side.

    Args:
        raylet: the head's.
        membership: its book of nodes; it tells them what is settled.
        standby: the node that would take over.
    """

    def __init__(self, raylet: Raylet, head: HeadCore, membership: Membership, standby: int) -> None:
        self._raylet = raylet
        self._head = head
        self._standby = standby
        self._serial = 0
        self._sent_at = 0.0
        self._taken: dict[int, int] = {}
        self._settled: dict[int, int] = {}
        self._unkept: deque[tuple[int, dict[int, int]]] = deque()
        self._replies: deque[tuple[int, Send]] = deque()
        self._answers: list[tuple[bytes, m.GcsReply]] = []
        membership.settled = lambda node: self._settled.get(node, 0)
        raylet.loop.each_turn.append(self._turn)
        raylet.handlers |= dict.fromkeys(_ANSWERED, self._answered) | {m.RowsKept: self._kept}

    def send(self, rows: list[m.Change], whole: bool) -> None:
        """Changes of the head's tables, with how much of what nodes have said is in them."""
        self._serial += 1
        self._sent_at = self._raylet.loop.now
        self._taken = dict(self._raylet.router.to_head.taken)
        self._unkept.append((self._serial, self._taken))
        answers, self._answers = self._answers, []
        self._raylet.router.send(raylet_of(self._standby), m.Rows(self._serial, rows, whole, self._taken, answers))

    def _answered(self, now: float, src: bytes, msg: m.Message) -> Iterable[Effect]:
        """An answer that says that something is registered leaves when the standby has it."""
        notes = self._head.journal.notes
        before = notes.count
        effects = self._head.handle(now, src, msg)
        if notes.count == before:
            return effects
        others = []
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.msg, m.GcsReply) and effect.msg.req:
                self._replies.append((self._serial + 1, effect))
                self._answers.append((effect.dest, effect.msg))
            else:
                others.append(effect)
        return others

    def _turn(self) -> None:
        """What changes no row is settled too, a little later."""
        due = self._sent_at + self._raylet.seat.config.heartbeat_interval
        if self._serial and self._raylet.loop.now >= due and self._raylet.router.to_head.taken != self._taken:
            self.send([], False)

    def _kept(self, now: float, src: bytes, msg: m.RowsKept) -> Iterable[Any]:
        while self._unkept and self._unkept[0][0] <= msg.serial:
            self._settled = self._unkept.popleft()[1]
        ready = []
        while self._replies and self._replies[0][0] <= msg.serial:
            ready.append(self._replies.popleft()[1])
        return ready


class Standby:
    """The side of all other raylets.

    Args:
        raylet: its tables get the handlers of this conversation.
        cluster: where it is told of deaths, and which leads when this raylet becomes the head.
        open_file: then opens the journal on disk.
    """

    def __init__(self, raylet: Raylet, cluster: Cluster, open_file: Opener) -> None:
        self._raylet = raylet
        self._cluster = cluster
        self._open_file = open_file
        cluster.followed = self.head_gone
        self._next = raylet.seat.driver_rank
        self._replica = Replica()
        self._taken: dict[int, int] | None = None
        self._answers: deque[tuple[float, bytes, m.GcsReply]] = deque()
        self._silent_since = 0.0
        raylet.router.to_head.keeping = True
        raylet.handlers |= {m.Heartbeat: self._beat, m.NewHead: self._new_head}
        if raylet.node == self._next:
            raylet.handlers |= {m.Rows: self._rows, m.HeadLost: self._head_lost}

    def head_gone(self, reason: str, certain: bool) -> bool:
        """The head is not heard of any more. Whether there is, or may be, another one.

        Args:
            certain: its process has ended; else it may only be silent.
        """
        raylet, headship = self._raylet, self._raylet.headship
        if headship.epoch or self._next in raylet.router.lost_nodes:
            return False
        if raylet.node == self._next:
            if self._taken is None:
                return False
            if certain or self._silent_for_long():
                self._take_over(reason)
            return True
        if not headship.lost:
            headship.gone()
            raylet.router.send(raylet_of(self._next), m.HeadLost(headship.node, reason))
            limit = raylet.loop.now + raylet.seat.config.head_timeout + PATIENCE
            raylet.loop.call_at(limit, lambda: self._out_of_patience(reason))
        return True

    # ------------------------------------------------------------ while the head lives

    def _beat(self, now: float, src: bytes, msg: m.Heartbeat) -> Iterable[Any]:
        if node_of(src) == self._raylet.headship.node:
            self._silent_since = 0.0
            self._raylet.router.to_head.settled(msg.settled)
        return _NOTHING

    def _rows(self, now: float, src: bytes, msg: m.Rows) -> Iterable[Any]:
        if node_of(src) != self._raylet.headship.node or (self._taken is None and not msg.whole):
            return _NOTHING
        self._replica.take(msg.changes, msg.whole)
        self._taken = msg.taken
        self._answers.extend((now, dest, reply) for dest, reply in msg.answers)
        while self._answers and self._answers[0][0] < now - ANSWERS_KEPT:
            self._answers.popleft()
        return [Send(src, m.RowsKept(msg.serial))]

    def _head_lost(self, now: float, src: bytes, msg: m.HeadLost) -> Iterable[Any]:
        """Another node cannot reach it: see whether we can."""
        headship = self._raylet.headship
        if headship.node == msg.node and msg.node != self._raylet.node:
            return [Send(raylet_of(msg.node), m.Ping(self._raylet.node))]  # fails at once if it is dead
        return _NOTHING

    # ------------------------------------------------------------ when it is dead

    def _silent_for_long(self) -> bool:
        """Whether a head that is only cut off has given this node up by now, and so ended the job on its side."""
        config, now = self._raylet.seat.config, self._raylet.loop.now
        self._silent_since = self._silent_since or now - config.head_timeout
        return now - self._silent_since > config.node_timeout + 2 * config.heartbeat_interval

    def _take_over(self, reason: str) -> None:
        raylet = self._raylet
        now, headship, config, me = raylet.loop.now, raylet.headship, raylet.seat.config, raylet.node
        headship.gone()
        head = SuccessorHead(config)
        who = head.take_over(now, self._replica, headship.node)
        membership = Membership(raylet.seat.cluster_size, who.session, config, now, me)
        membership.resume(now, who.infos, who.dead, raylet.run)
        old = headship.node
        unwritten = raylet.buried - who.dead.keys()
        died = membership.node_failed(now, old, reason)
        self._tell(membership, old)
        for node, why in list(raylet.router.lost_nodes.items()):
            died += membership.node_failed(now, node, why)  # in the old head's last moment
        raylet.router.to_head.keeping = False
        self._replica = Replica()
        raylet.say("this node is the head from now on")
        raylet.lead(head, HANDLES)
        self._cluster.lead(head, membership)
        headship.moved_to(me, headship.epoch + 1, (self._taken or {}).get(me, 0))
        raylet.router.to_head.settled(_ALL)
        raylet.apply(effect for effect in died if not _is_death_of(old, effect))  # which `NewHead` has told
        for node in sorted(unwritten):  # dead and buried here by the old head's word, and only the journal lacks it
            raylet.apply(head.node_died(now, node, raylet.router.lost_nodes[node]))
        self._keep_file(head)

    def _keep_file(self, head: HeadCore, told: bool = False) -> None:
        """The journal on disk. A file server may keep the lock of a machine that is lost for a while."""
        loop = self._raylet.loop
        try:
            file = self._open_file()
        except StartupError as error:
            if not told:
                self._raylet.say(f"no journal is kept for now: {error}")
            loop.call_at(loop.now + LOCK_RETRY, lambda: self._keep_file(head, True))
            return
        if file is not None:
            Journaling(self._raylet, head, lambda: True).files.append(file)

    def _tell(self, membership: Membership, old: int) -> None:
        """All who live; with how much of what they have said to the old head is known here, and who else is dead."""
        raylet, taken = self._raylet, self._taken or {}
        others = [
            m.NodeDied(node, why, at + 1) for at, (node, why) in enumerate(membership.dead.items()) if node != old
        ]
        for node in membership.alive():
            if node != raylet.node:
                died = (old, membership.dead[old], len(membership.dead))
                term = raylet.headship.epoch + 1
                raylet.router.send(raylet_of(node), m.NewHead(raylet.node, term, taken.get(node, 0), *died))
                for other in others:
                    raylet.router.send(raylet_of(node), other)
        for _, proc, reply in self._answers:  # before these are asked for again: the first answer counts
            raylet.router.send(proc, reply)

    def _new_head(self, now: float, src: bytes, msg: m.NewHead) -> Iterable[Any]:
        router, headship = self._raylet.router, self._raylet.headship
        if msg.node == node_of(src) and msg.term > headship.epoch:
            headship.gone()
            old = m.NodeDied(msg.old, msg.reason, msg.epoch)
            router.last_word(msg.old, old)  # the old head may live: whoever reaches it ends it
            self._cluster.beats.moved(now, msg.node)
            self._raylet.apply(self._raylet.handlers[m.NodeDied](now, src, old))
            headship.moved_to(msg.node, msg.term, msg.taken)
            router.to_head.keeping = False
        return _NOTHING

    def _out_of_patience(self, reason: str) -> None:
        if self._raylet.headship.lost:
            self._cluster.head_died(f"{reason}, and node {self._next} did not take over")


def follow(raylet: Raylet, cluster: Cluster, membership: Membership | None, open_file: Opener) -> None:
    """Have the head's journal kept, and another raylet take over when the head dies, where that can be.

    Args:
        membership: on the head.
        open_file: opens the journal on disk, if there is to be one.

    Raises:
        StartupError: the journal of an earlier run cannot be read.
    """
    succeeded = raylet.seat.driver_rank != 0 and raylet.seat.cluster_size > 1
    if membership is None or raylet.head is None:
        if succeeded:
            Standby(raylet, cluster, open_file)
        return
    head, book, file = raylet.head, membership, open_file()
    if file is not None:
        head.earlier = read_back(file)
    if succeeded or file is not None:
        journaling = Journaling(raylet, head, lambda: book.state == UP and head.earlier is None)
        if succeeded:
            journaling.sinks.append(Leading(raylet, head, book, raylet.seat.driver_rank).send)
        if file is not None:
            journaling.files.append(file)


def _is_death_of(node: int, effect: Any) -> bool:
    return isinstance(effect, Send) and isinstance(effect.msg, m.NodeDied) and effect.msg.node == node
