"""What an owner, and a borrower, does when no copy of an object is left: it is made again, or is an error from then on.

Who cannot get an object from any node it knows of tells the owner (`ObjectLost`). If the owner knows no other place, it
runs the task again that made the object, once for all who wait, and the answer is the new place. What the task needs
comes back in the same way, however far that goes. Pure; `remake` is what submits the task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hpcray.base.ids import PUT_INDEX, TASK_BYTES, node_of, owner_of, raylet_of
from hpcray.core.owner.borrowing import Borrowing
from hpcray.core.owner.entries import FREED, INLINE, PENDING, STORED, Entry, Waiter
from hpcray.core.owner.lineage import LINEAGE_EVICTED, LOST, PUT, Lineage
from hpcray.core.owner.pins import Pins
from hpcray.core.owner.replicas import Replicas
from hpcray.wire.messages import AddLocation, Message, ObjectLost, ObjectReady, Open

_FORGOTTEN = "nothing but what was made from it was referred to, so its copies were dropped"


class Losing(Borrowing):
    """The part of an object table that deals with losses.

    Attributes:
        pins: what stores, ours and neighbours', hold for us.
        lineage: what can be made again.
        replicas: copies that we hold on other nodes.
        dead_nodes: those that died; none comes back under its old number.
        why_lost: for objects of ours that are lost for good, why.
        remake: submits a kept task once more; None: nothing can be made again.
        special: the objects with which something of this has to do; all others pay for one look into it.
    """

    def __init__(
        self,
        me: bytes,
        send: Callable[[bytes, Message], None],
        notify: Callable[[Waiter], None],
        lost: Callable[[bytes, str, str], bytes],
        lineage_limit: int,
    ) -> None:
        super().__init__(me, send)
        self._node = node_of(me)
        self._raylet = raylet_of(self._node)
        self._lost = lost
        self.lineage = Lineage(me, lineage_limit, self._unneeded, self._evicted)
        self.replicas = Replicas(send, notify)
        self.dead_nodes: set[int] = set()
        self.pins = Pins(self._node, send, self.dead_nodes)
        self.why_lost: dict[bytes, str] = {}
        self.remake: Callable[[Any], None] | None = None
        self.special: set[bytes] = set()
        # So many times objects of ours were made again; for borrowed ones, what the owner said last.
        self._made: dict[bytes, int] = {}
        # Objects of ours whose first copy is gone, while a store that we asked may have another.
        self._unsure: set[bytes] = set()

    def _ready(self, oid: bytes, entry: Entry) -> None:
        raise NotImplementedError

    def on_object_get(self, src: bytes, oid: bytes) -> None:
        """A borrower asks for the value."""
        raise NotImplementedError

    def on_add_location(self, msg: AddLocation) -> None:
        """A node has a copy now."""
        raise NotImplementedError

    # ------------------------------------------------------------ who cannot get an object

    def _not_there(self, oid: bytes, entry: Entry, asked: Sequence[int], reason: str) -> None:
        """Our store found a stored object on none of these nodes."""
        others = [n for n in entry.nodes or () if n not in asked and n not in self.dead_nodes and n != self._node]
        if others:
            if oid[:8] == self.me and (oid in self._unsure or (entry.nodes and entry.nodes[0] == self._node)):
                self._stays_at(oid, entry, others[0])
            self._ready(oid, entry)  # opens it again, from there, if somebody waits
        elif oid[:8] == self.me:
            self.lose(oid, entry, reason)
        else:
            entry.state, entry.nodes, entry.asked = PENDING, None, True
            self._send(owner_of(oid), ObjectLost(oid, self._made.get(oid, 0), list(asked), reason))

    def on_object_lost(self, src: bytes, msg: ObjectLost) -> None:
        """A borrower cannot get an object of ours."""
        oid = msg.id
        entry = self.entries.get(oid)
        if entry is not None and entry.state == STORED and msg.made == self._made.get(oid, 0):
            self._at_pin(entry)
            if not [n for n in entry.nodes or () if n not in msg.nodes and n not in self.dead_nodes]:
                why = self._why_not(entry)
                if why and any(node not in self.dead_nodes for node in entry.nodes or ()):
                    # Perhaps only the way from there to here is broken; others can still read it.
                    self._send(src, ObjectReady(oid, 0, self._lost(oid, msg.reason, why), 0, []))
                    return
                self.lose(oid, entry, msg.reason)
        self.on_object_get(src, oid)

    # ------------------------------------------------------------ the owner

    def lose(self, oid: bytes, entry: Entry, reason: str) -> None:
        """Every copy of a stored object of ours is gone."""
        left = [node for node in entry.nodes or () if node not in self.dead_nodes]
        if left:  # perhaps it is there after all; it goes with the object
            entry.left_at = [*(entry.left_at or ()), *left]
        entry.nodes = None
        self._unsure.discard(oid)
        # What it holds stays held: who has read this life of it, or still has it pinned, may take the refs out later.
        self.replicas.gone(oid)
        self._make_again(oid, entry, reason)

    def _make_again(self, oid: bytes, entry: Entry, reason: str) -> None:
        why = self._why_not(entry)
        if why:
            self.settle_lost(oid, entry, reason, why)
            return
        self.special.add(oid)
        self._made[oid] = self._made.get(oid, 0) + 1
        entry.state = PENDING
        assert self.remake is not None
        self.remake(entry.task)

    def revive(self, oid: bytes, entry: Entry) -> None:
        """Somebody wants what only lineage remembers."""
        if entry.state == FREED:
            self._make_again(oid, entry, _FORGOTTEN)

    def _why_not(self, entry: Entry) -> str:
        """Why an object of ours cannot be made again; "" when it can."""
        task = entry.task
        if task is None or isinstance(task, str):
            return task or PUT
        if self.remake is None:
            return LOST
        kept = self.lineage.kept.get(task.id)
        if kept is not None and kept.running and not task.cancelled:
            return ""  # perhaps this run makes it; its end decides
        return self.lineage.why_not(task) or ("" if kept is not None else LINEAGE_EVICTED)

    def settle_lost(self, oid: bytes, entry: Entry, reason: str, why: str) -> None:
        """It cannot be had any more: an error from now on."""
        entry.state = INLINE
        entry.value = self._lost(oid, reason, why)
        if oid[:8] == self.me:
            self.special.add(oid)
            self.why_lost[oid] = f"[{why}] {reason}"
            self.forget_task(oid, entry)
        self._ready(oid, entry)

    def forget_task(self, oid: bytes, entry: Entry) -> None:
        """Nothing will have to make the object again."""
        task, entry.task = entry.task, None
        if task is not None and not isinstance(task, str) and self.lineage.kept:
            self.lineage.gone(oid, task.id)

    def keep_task(self, task: Any, returns: Sequence[bytes], args: Sequence[bytes], size: int) -> None:
        """`task` has just made these returns, which may be lost one day: see that they can be made again.

        Args:
            args: ids of the refs that its arguments mention. size: bytes of its arguments.
        """
        why = self.lineage.why_not(task)
        known = [oid for oid in returns if oid in self.entries]
        if known and not why:
            self.special.update(known)
            self.special.update(args)
            self.lineage.keep(task, known, args, size)
        for oid in known:
            self.entries[oid].task = why or task
            if why:
                self.lineage.gone(oid, task.id)

    def hibernate(self, oid: bytes, entry: Entry) -> None:
        """Nobody holds an object of ours, but a task that took it may have to run again: keep what makes it.

        A value that needs no room in a store, nor holds anything that does, stays.
        """
        held = entry.contained and (entry.task is not None or oid[TASK_BYTES:] == PUT_INDEX)  # else of an earlier life
        if entry.state == STORED or held:
            entry.state, entry.value = FREED, b""
        mapping, entry.mapping = entry.mapping, None
        entry.nodes = entry.left_at = entry.contained = None
        self._unsure.discard(oid)
        self.pins.entry_gone(oid, mapping)

    def take_again(self, oids: Sequence[bytes]) -> None:
        """Count a ref to each of these once more: a task that mentions them is to run again."""
        for oid in oids:
            entry = self.entries.get(oid)
            if entry is not None:
                entry.local += 1
            else:
                entry = self.entries[oid] = Entry()
                entry.local = 1
                if oid[:8] != self.me:
                    self._register([oid])
                else:
                    self.settle_lost(oid, entry, _FORGOTTEN, LOST)
            self.revive(oid, entry)

    def made_inline(self, oid: bytes, entry: Entry, contained: list[Any] | None) -> None:
        """An object that may have had earlier lives is a value in a message now, which cannot be lost."""
        entry.contained = self.all_held(entry, contained)
        if contained is None:
            self.forget_task(oid, entry)

    @staticmethod
    def all_held(entry: Entry, contained: list[Any] | None) -> list[Any] | None:
        """What an object holds, in this life and in earlier ones."""
        return contained if entry.contained is None else [*entry.contained, *(contained or ())]

    def _evicted(self, oid: bytes) -> None:
        self.entries[oid].task = LINEAGE_EVICTED

    def dropped(self, oid: bytes, entry: Entry) -> None:
        """The entry of an object is gone."""
        self.forget_task(oid, entry)
        self.special.discard(oid)
        self._unsure.discard(oid)
        self._made.pop(oid, None)
        self.why_lost.pop(oid, None)

    def _unneeded(self, oid: bytes) -> None:
        entry = self.entries.get(oid)
        if entry is not None and entry.local <= 0 and not entry.borrowers and entry.state != PENDING:
            self._maybe_free(oid, entry)

    # ------------------------------------------------------------ nodes

    def node_died(self, node: int, reason: str) -> None:
        """What was there is gone. (Of the processes of that node `process_died` is told.)"""
        self.dead_nodes.add(node)
        self.replicas.node_died(node)
        gone = []
        for oid, entry in list(self.entries.items()):
            if entry.left_at and node in entry.left_at:
                entry.left_at = [n for n in entry.left_at if n != node]
            if entry.nodes and node in entry.nodes:
                first = self._not_at(entry, node)
                if entry.state == STORED and (first or not entry.nodes):
                    gone.append(oid)
        for oid in gone:
            found = self.entries.get(oid)
            if found is not None and found.state == STORED:
                self._first_is_gone(oid, found, f"the node that had it died: {reason}")

    def processes_of(self, node: int) -> set[bytes]:
        """The processes of a node that we have to do with: they own, or hold, what is in this table."""
        entries = list(self.entries.items())
        found = {oid[:8] for oid, entry in entries if node_of(oid) == node and entry.state == PENDING}
        for oid in self._lent:
            for key in self.entries[oid].borrowers or ():
                found.update(proc for proc in (key[:8], key[8:]) if proc and node_of(proc) == node)
        return found

    def _first_is_gone(self, oid: bytes, entry: Entry, reason: str) -> None:
        """The first copy, which its node does not evict, is not there any more. Another one takes its place."""
        mine = oid[:8] == self.me
        if entry.nodes:
            held = self.replicas.held.get(oid, ())
            found = [node for node in entry.nodes if node in held]
            if mine:
                self._stays_at(oid, entry, found[0] if found else min(entry.nodes, key=self._is_far))
        elif oid not in self.pins.opening:
            if mine:
                self.lose(oid, entry, reason)
            else:
                entry.state, entry.asked = PENDING, False  # its owner will know another place
        elif mine:  # the store that was asked will tell whether it came in time
            self.special.add(oid)
            self._unsure.add(oid)

    def _is_far(self, node: int) -> bool:
        return node != self._node

    def _stays_at(self, oid: bytes, entry: Entry, node: int) -> None:
        """See that this node, which may have evicted its copy of an object of ours, does not evict it from now on."""
        self.special.add(oid)
        self._in_front(entry, node)
        if node == self._node and entry.mapping is None:
            self.pins.open(oid, entry)
        at = self._node if entry.mapping is None else entry.mapping.node
        if node == self._node and at not in self.dead_nodes:
            node = at  # that copy is there for sure
            self._in_front(entry, node)
        if node != self._node:
            self._unsure.discard(oid)
            self.replicas.hold(oid, entry, node)
        elif at == node and entry.mapping is not None:  # pinned, so it is there; the pin goes sooner or later
            self._keep_here(oid, entry)
        else:  # it is not pinned there yet; what we may have mapped is memory of a node that is dead
            self._unsure.add(oid)
            self.pins.ask(oid, entry)

    @staticmethod
    def _in_front(entry: Entry, node: int) -> None:
        entry.nodes = [node, *(other for other in entry.nodes or () if other != node)]

    def _came(self, oid: bytes, entry: Entry, node: int) -> None:
        """A store, our own as a rule, has found an object of `_unsure`."""
        if entry.state != STORED:
            return
        if node == self._node and entry.mapping is not None and entry.mapping.node != node:
            self._keep_here(oid, entry)
        else:
            self._stays_at(oid, entry, node)

    def _keep_here(self, oid: bytes, entry: Entry) -> None:
        self._unsure.discard(oid)
        self._send(self._raylet, Open(oid, entry.size, [], keep=True))

    def on_replica(self, oid: bytes, node: int, problem: str) -> None:
        """Another node's store answers that it holds a copy for us, or cannot ("" when it does)."""
        entry = self.entries.get(oid)
        if oid[:8] != self.me:
            return
        if entry is None or node not in self.replicas.held.get(oid, ()):
            if not problem:  # we gave it up meanwhile: it is a copy like any other
                self.on_add_location(AddLocation(oid, node))
            return
        self.replicas.answered(oid, node, problem)
        if not problem:
            self._also_at(entry, node)
        elif entry.nodes and node in entry.nodes and entry.state == STORED:
            first = self._not_at(entry, node)
            if first:
                self._first_is_gone(oid, entry, problem)

    def _not_at(self, entry: Entry, node: int) -> bool:
        """That node, one of those that had it, has it no more; whether its copy was the first."""
        assert entry.nodes
        first = entry.nodes[0] == node
        entry.nodes = [n for n in entry.nodes if n != node]
        if entry.mapping is not None and entry.mapping.node != node:
            self._at_pin(entry)
        return first

    def _at_pin(self, entry: Entry) -> None:
        """What we have pinned is there, if that node lives; its memory can be read longer than that, by us."""
        if entry.mapping is not None and entry.mapping.node not in self.dead_nodes:
            self._also_at(entry, entry.mapping.node)

    def _also_at(self, entry: Entry, node: int) -> None:
        if entry.nodes is None:
            entry.nodes = [node]
        elif node not in entry.nodes:
            entry.nodes.append(node)
