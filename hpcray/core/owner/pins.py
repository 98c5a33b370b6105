"""One process's pins in node stores: at most one per object, however many views, and one unanswered Open.

What its own node's store has, or can get, is read there. What a neighbour's store has (a node of the same host) is read
in that one, in place: it is shared memory too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hpcray.base.ids import raylet_of
from hpcray.core.owner.entries import FREED, INLINE, Entry, Mapping
from hpcray.wire.messages import DiskRead, Hurry, Message, OnDisk, Open, Opened, Release


class Visits(Protocol):
    """The connections of a process to its neighbours' stores."""

    def meet(self, node: int) -> None:
        """Connect; `met` or `unmet` follows."""

    def send(self, node: int, msg: Message) -> None:
        """Say something to a store that was met."""

    def leave(self, node: int) -> None:
        """Nothing of that node's memory is read any more; it is dead."""


class NoVisits:
    """Nobody hears it: there are no neighbours, or it is a replay."""

    def meet(self, node: int) -> None:
        """As of any visits."""

    def send(self, node: int, msg: Message) -> None:
        """As of any visits."""

    def leave(self, node: int) -> None:
        """As of any visits."""


class Pins:
    """What outlives the entries of a table: questions to the stores, and pins that views still need.

    An entry may go (its last ref died) while the store's answer is under way, and come again before it is here. The
    answer then serves the new entry; without one the pin that it brought is given back at once. A Release never leaves
    before the Opened that it answers has come.

    A pin without views is kept, so that the next read costs nothing, until the store asks for it (`give_up`).

    Args:
        node: our own.
        send: queue a message for a process or raylet.
        dead: nodes that died.

    Attributes:
        opening: objects with an Open under way: the nodes on which they are looked for, and the one that was asked.
        lingering: pins whose entry is gone, held for the views that readers still have.
        mapped: entries with a pin, the one that got it first in front.
        gathering: lists of objects that somebody is about to read together: their pins stay.
        refused: why the store had no room for an object, until it is asked again.
        files: what our store lets us read from disk ourselves, for want of room, and how many threads are at it.
        near: the neighbours whose stores we can read, and whether we have met them.
        visits: how.
    """

    def __init__(self, node: int, send: Callable[[bytes, Message], None], dead: set[int]) -> None:
        self.opening: dict[bytes, tuple[list[int], int]] = {}
        self.lingering: dict[bytes, Mapping] = {}
        self.mapped: dict[bytes, Entry] = {}
        self.gathering: list[list[bytes]] = []
        self.refused: dict[bytes, str] = {}
        self.files: dict[bytes, tuple[OnDisk, int]] = {}
        self.near: dict[int, bool] = {}
        self.visits: Visits = NoVisits()
        self._patient: dict[bytes, int] = {}  # of `opening`, those that are not urgent: their priority
        # Of `opening`, files that could not be read: how many threads still try, and why it failed first.
        self._unreadable: dict[bytes, tuple[OnDisk, int, str]] = {}
        self._parked: dict[int, dict[bytes, int]] = {}  # of `opening`, by node, what waits until we have met: its size
        self._reading: dict[int, int] = {}  # of `dead`, when `node_died` was told: how much of its memory is still read
        self._node = node
        self._raylet = raylet_of(node)
        self._dead = dead
        self._send = send

    # ------------------------------------------------------------ asking

    def open(self, oid: bytes, entry: Entry, priority: int = 0) -> bool:
        """Get a stored object mapped for its entry; whether it is so at once, or can be read from disk, else `opened`,
        `lent` or `failed` follows.

        Args:
            priority: see `wire.messages.Open`.
        """
        mapping = self.lingering.pop(oid, None)
        if mapping is not None:  # views of an earlier life of this ref hold the very pin
            entry.mapping = mapping
            self.mapped[oid] = entry
            return True
        if oid in self.files:
            return True
        if oid not in self.opening:
            nodes = entry.nodes or ()
            if self.near and self._node not in nodes:
                for node in nodes:
                    if node in self.near and node not in self._dead:
                        self._open_near(oid, entry.size, node, priority)
                        return False
            self.ask(oid, entry, priority)
        elif priority < self._patient.get(oid, 0):
            self._patient[oid] = priority
            node = self.opening[oid][1]
            if oid not in self._parked.get(node, ()):
                self._say(node, Hurry(oid, priority))
        return False

    def ask(self, oid: bytes, entry: Entry, priority: int = 0) -> None:
        """Have our store look for the object, whatever else we read."""
        if oid not in self.opening:
            nodes = list(entry.nodes or ())
            self._await(oid, nodes, self._node, priority)
            self._send(self._raylet, Open(oid, entry.size, nodes, priority))

    def _await(self, oid: bytes, nodes: list[int], whom: int, priority: int) -> None:
        self.opening[oid] = (nodes, whom)
        self.refused.pop(oid, None)
        if priority:
            self._patient[oid] = priority

    def _open_near(self, oid: bytes, size: int, node: int, priority: int) -> None:
        self._await(oid, [node], node, priority)
        if self.near[node]:
            self._ask_near(oid, size, node)
        elif node in self._parked:
            self._parked[node][oid] = size
        else:
            self._parked[node] = {oid: size}
            self.visits.meet(node)

    def _ask_near(self, oid: bytes, size: int, node: int) -> None:
        self.visits.send(node, Open(oid, size, [], self._patient.get(oid, 0)))

    def met(self, node: int) -> None:
        """We can speak to a neighbour's store now."""
        self.near[node] = True
        for oid, size in self._parked.pop(node, {}).items():
            self._ask_near(oid, size, node)

    def unmet(self, node: int) -> list[bytes]:
        """We cannot, or not any more. What it was asked for has to be asked for again: these objects."""
        self.near.pop(node, None)
        parked = self._parked.pop(node, {})
        asked = [oid for oid, (_, whom) in self.opening.items() if whom == node]
        for oid in asked:
            self.answered(oid)
            if oid not in parked:
                self._say(node, Release([oid]))  # it has heard us, and its answer may be lost
        return asked

    def _say(self, node: int, msg: Message) -> None:
        """Tell a store something, on whatever way there is."""
        if node == self._node:
            self._send(self._raylet, msg)
        elif self.near.get(node):
            self.visits.send(node, msg)
        elif node not in self._dead:
            self._send(raylet_of(node), msg)

    # ------------------------------------------------------------ answers

    def asked(self, oid: bytes) -> int:
        """The node whose store owes us an answer about the object; our own where none does."""
        return self.opening[oid][1] if oid in self.opening else self._node

    def asks(self, oid: bytes, node: int) -> bool:
        """Whether that node's store owes us an answer about the object."""
        return oid in self.opening and self.opening[oid][1] == node

    def opened(self, msg: Opened, entry: Entry | None) -> bool:
        """A store pinned an object for us; whether anybody here still wants it."""
        _, node = self.answered(msg.id)
        if entry is None or entry.state in (FREED, INLINE):
            self._say(node, Release([msg.id]))
            return False
        if entry.mapping is None:
            self.created(msg.id, entry, msg.offset, msg.size, node)
        return True

    def give_back(self, oid: bytes, node: int) -> None:
        """We read it elsewhere, in memory of a node that is dead."""
        self._say(node, Release([oid]))

    def created(self, oid: bytes, entry: Entry, offset: int, size: int, node: int) -> None:
        """The object lies there, pinned for us."""
        entry.mapping = Mapping(offset, size, node)
        self.mapped[oid] = entry

    def answered(self, oid: bytes) -> tuple[list[int], int]:
        """An answer has come; the nodes on which the object was looked for, and the one that was asked."""
        if self._patient:
            self._patient.pop(oid, None)
        return self.opening.pop(oid, None) or ([], self._node)

    # ------------------------------------------------------------ files

    def lent(self, msg: OnDisk, entry: Entry | None) -> bool:
        """There is no room in our store, but the object's file may be read; whether anybody here wants that."""
        self.answered(msg.id)
        if entry is None or entry.state in (FREED, INLINE) or entry.mapping is not None or msg.id in self.files:
            self._send(self._raylet, DiskRead(msg.id))
            return False
        self.files[msg.id] = (msg, 0)
        return True

    def begin_file(self, oid: bytes) -> OnDisk:
        """A thread begins to read a file of `files`."""
        msg, readers = self.files[oid]
        self.files[oid] = (msg, readers + 1)
        return msg

    def end_file(self, oid: bytes) -> None:
        """It has read it, or given up."""
        if oid in self._unreadable:
            self._give_back_unreadable(oid)
            return
        msg, readers = self.files[oid]
        self.files[oid] = (msg, readers - 1)
        if readers == 1:
            self._close_file(oid)

    def file_failed(self, oid: bytes, entry: Entry | None, error: str) -> None:
        """It could not be read: the store is to get the object otherwise. `opened`, `lent` or `failed` follows."""
        if oid in self.files:
            self._unreadable[oid] = (*self.files.pop(oid), error)
            self.opening[oid] = (list(entry.nodes or ()) if entry is not None else [], self._node)
        self._give_back_unreadable(oid)

    def _give_back_unreadable(self, oid: bytes) -> None:
        """One thread less is at it; what lies there must stay until none is."""
        msg, readers, error = self._unreadable.pop(oid)
        if readers > 1:
            self._unreadable[oid] = (msg, readers - 1, error)
        else:
            self._send(self._raylet, DiskRead(oid, error, msg.size, self.opening[oid][0]))

    def _close_file(self, oid: bytes) -> None:
        del self.files[oid]
        self._send(self._raylet, DiskRead(oid))

    # ------------------------------------------------------------ giving back

    def give_up(self, size: int, node: int) -> None:
        """Room is short at a node: release pins there of about `size` bytes that no view needs and nobody gathers."""
        if not self.mapped:
            return
        wanted = {oid for oids in self.gathering for oid in oids}
        given = []
        for oid, entry in self.mapped.items():
            if size <= 0:
                break
            mapping = entry.mapping
            if mapping is not None and mapping.node == node and not mapping.views and oid not in wanted:
                entry.mapping = None
                size -= mapping.size
                given.append(oid)
        for oid in given:
            del self.mapped[oid]
        if given:
            self._say(node, Release(given))

    def entry_gone(self, oid: bytes, mapping: Mapping | None) -> None:
        """The last ref died: the pin goes, or stays for the views that live on."""
        self.refused.pop(oid, None)
        if oid in self.files and not self.files[oid][1]:
            self._close_file(oid)
        if mapping is None:
            return
        self.mapped.pop(oid, None)
        if mapping.views:
            self.lingering[oid] = mapping
        else:
            self._release(oid, mapping.node)

    def view_died(self, oid: bytes, entry: Entry | None) -> None:
        """The last buffer of one read died."""
        mapping = self.lingering.get(oid)
        if mapping is not None:
            mapping.views -= 1
            if mapping.views == 0:
                del self.lingering[oid]
                self._release(oid, mapping.node)
        elif entry is not None and entry.mapping is not None:
            mapping = entry.mapping
            mapping.views -= 1
            if mapping.views == 0 and mapping.node in self._dead:
                entry.mapping = None
                del self.mapped[oid]
                self._release(oid, mapping.node)

    def _release(self, oid: bytes, node: int) -> None:
        if node not in self._dead:
            self._say(node, Release([oid]))
        elif node in self._reading:
            self._reading[node] -= 1
            if not self._reading[node]:
                self.visits.leave(node)

    def node_died(self, node: int) -> None:
        """A node is gone. What was read there can be read on as long as views of it live, but is not there any more.
        What it was asked for has to be asked for again (`unmet`)."""
        for oid in [oid for oid, entry in self.mapped.items() if entry.mapping and entry.mapping.node == node]:
            entry = self.mapped.pop(oid)
            mapping, entry.mapping = entry.mapping, None
            if mapping is not None and mapping.views:
                self.lingering[oid] = mapping
        self._reading[node] = sum(mapping.node == node for mapping in self.lingering.values())
        if not self._reading[node]:
            self.visits.leave(node)
