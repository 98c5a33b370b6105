"""One process's pins in node stores: at most one per object, however many views, and one unanswered Open.

An object that the store of our own node has, or can get, is read there. An object that the store of a neighbor has (a
node of the same host) is read in that store, in place: its memory is shared with us too, so nothing need be copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from hpcray.common.ids import raylet_of
from hpcray.core.core_worker.object_entry import INLINE, LINEAGE_ONLY, ArenaMapping, ObjectEntry
from hpcray.protocol.messages import DiskRead, Message, OnDisk, Open, Opened, RaisePriority, Release


class NeighborStores(Protocol):
    """The connections of a process to the stores of its neighbors."""

    def meet(self, node: int) -> None:
        """Connect; `ObjectPins.met` or `ObjectRecovery.neighbor_lost` follows."""

    def send(self, node: int, msg: Message) -> None:
        """Send to a store that was met."""

    def leave(self, node: int) -> None:
        """Unmap the memory of a dead node: nothing of it is read any more."""


class NullNeighborStores:
    """The neighbor stores of a process without neighbors."""

    def meet(self, node: int) -> None:
        pass

    def send(self, node: int, msg: Message) -> None:
        pass

    def leave(self, node: int) -> None:
        pass


class ObjectPins:
    """Requests to the stores, and the pins that views still need: these outlive the entries of the table.

    An entry may go (its last ref died) while the store's answer is under way, and come again before the answer is here.
    The answer then serves the new entry; without one the pin that it brought is given back at once. A Release never
    leaves before the Opened that it answers has come.

    A pin without views is kept, so that the next read costs nothing, until the store asks for it (`give_up`).

    Args:
        node: our own.
        entries: the table's objects.
        send: queue a message for a process or raylet.
        dead: nodes that died.

    Attributes:
        opening: objects with an Open under way: the nodes on which they are looked for, and the node that got the Open.
        views_without_entry: pins whose entry is gone, or not there yet, held for the views of readers or the writer.
        mapped: entries with a pin, the oldest first.
        being_read: lists of objects that a thread is about to read together: their pins stay.
        refused: the reason why the store had no room for an object; removed by the next request.
        files: objects that our store lets us read from disk ourselves, for want of room, and the number of readers.
        begin_read, end_read: add a list to `being_read`, and remove it.
    """

    def __init__(
        self, node: int, entries: dict[bytes, ObjectEntry], send: Callable[[bytes, Message], None], dead: set[int]
    ) -> None:
        self.opening: dict[bytes, tuple[list[int], int]] = {}
        self.views_without_entry: dict[bytes, ArenaMapping] = {}
        self.mapped: dict[bytes, ObjectEntry] = {}
        self.being_read: list[list[bytes]] = []
        self.refused: dict[bytes, str] = {}
        self.files: dict[bytes, tuple[OnDisk, int]] = {}
        self._neighbors: dict[int, bool] = {}  # those whose stores we can read; True once we are connected
        self._stores: NeighborStores = NullNeighborStores()
        self._not_urgent: dict[bytes, int] = {}  # of `opening`: the priority
        # Of `opening`, files that could not be read: number of threads that still try, and the first error.
        self._unreadable: dict[bytes, tuple[OnDisk, int, str]] = {}
        self._parked: dict[int, dict[bytes, int]] = {}  # of `opening`, by node, what waits for a connection: its size
        self._reading: dict[int, int] = {}  # of `dead`, since `node_died`: the number of mappings still read
        self._node = node
        self._raylet = raylet_of(node)
        self._entries = entries
        self._dead = dead
        self._send = send
        # The lists' own methods: a `get` that waits pays for no further call.
        self.begin_read: Callable[[list[bytes]], None] = self.being_read.append
        self.end_read: Callable[[list[bytes]], None] = self.being_read.remove

    def open(self, oid: bytes, entry: ObjectEntry, priority: int = 0) -> bool:
        """Get a stored object mapped for its entry.

        Args:
            priority: see `protocol.messages.Open`.

        Returns:
            True when it is mapped, or can be read from disk, at once; else `opened`, `lent` or an error follows.
        """
        mapping = self.views_without_entry.pop(oid, None)
        if mapping is not None:  # views of an earlier life of this ref hold the very pin
            entry.mapping = mapping
            self.mapped[oid] = entry
            return True
        if oid in self.files:
            return True
        if oid not in self.opening:
            nodes = entry.nodes or ()
            if self._neighbors and self._node not in nodes:
                for node in nodes:
                    if node in self._neighbors and node not in self._dead:
                        self._open_at_neighbor(oid, entry.size, node, priority)
                        return False
            self.open_here(oid, entry, priority)
        elif priority < self._not_urgent.get(oid, 0):
            self._not_urgent[oid] = priority
            node = self.opening[oid][1]
            if oid not in self._parked.get(node, ()):
                self._send_to_store(node, RaisePriority(oid, priority))
        return False

    def open_here(self, oid: bytes, entry: ObjectEntry, priority: int = 0) -> None:
        """Have the store of our own node look for the object, whatever else we read."""
        if oid not in self.opening:
            nodes = list(entry.nodes or ())
            self._note_request(oid, nodes, self._node, priority)
            self._send(self._raylet, Open(oid, entry.size, nodes, priority))

    def _note_request(self, oid: bytes, nodes: list[int], at: int, priority: int) -> None:
        self.opening[oid] = (nodes, at)
        self.refused.pop(oid, None)
        if priority:
            self._not_urgent[oid] = priority

    def _open_at_neighbor(self, oid: bytes, size: int, node: int, priority: int) -> None:
        self._note_request(oid, [node], node, priority)
        if self._neighbors[node]:
            self._send_open(oid, size, node)
        elif node in self._parked:
            self._parked[node][oid] = size
        else:
            self._parked[node] = {oid: size}
            self._stores.meet(node)

    def _send_open(self, oid: bytes, size: int, node: int) -> None:
        self._stores.send(node, Open(oid, size, [], self._not_urgent.get(oid, 0)))

    def _send_to_store(self, node: int, msg: Message) -> None:
        if node == self._node:
            self._send(self._raylet, msg)
        elif self._neighbors.get(node):
            self._stores.send(node, msg)
        elif node not in self._dead:
            self._send(raylet_of(node), msg)

    # ------------------------------------------------------------ neighbors

    def use_neighbors(self, nodes: Iterable[int], stores: NeighborStores) -> None:
        """Read the objects in the stores of these nodes there, in place, as soon as there is a connection."""
        self._neighbors = dict.fromkeys(nodes, False)
        self._stores = stores

    def add_neighbors(self, nodes: list[int]) -> None:
        """Read in the stores of these nodes too, as soon as there is a connection."""
        for node in nodes:
            if node not in self._dead:
                self._neighbors.setdefault(node, False)

    def met(self, node: int) -> None:
        """The connection to a neighbor's store is there."""
        self._neighbors[node] = True
        for oid, size in self._parked.pop(node, {}).items():
            self._send_open(oid, size, node)

    def unmet(self, node: int) -> list[bytes]:
        """Stop reading at a neighbor: the connection failed or ended.

        Returns:
            The objects that were requested there and have to be requested again.
        """
        self._neighbors.pop(node, None)
        parked = self._parked.pop(node, {})
        requested = [oid for oid, (_, at) in self.opening.items() if at == node]
        for oid in requested:
            self.answered(oid)
            if oid not in parked:
                self._send_to_store(node, Release([oid]))  # the request has arrived, and the answer may be lost
        return requested

    # ------------------------------------------------------------ answers

    def requested_node(self, oid: bytes) -> int:
        """The node whose store owes us an answer about the object; our own where none does."""
        return self.opening[oid][1] if oid in self.opening else self._node

    def awaits(self, oid: bytes, node: int) -> bool:
        """True while that node's store owes us an answer about the object."""
        return oid in self.opening and self.opening[oid][1] == node

    def opened(self, msg: Opened) -> ObjectEntry | None:
        """A store pinned an object for us.

        Returns:
            The entry that the pin serves; None where no entry needs it, and the pin goes back.
        """
        _, node = self.answered(msg.id)
        entry = self._entries.get(msg.id)
        if entry is None or entry.state in (LINEAGE_ONLY, INLINE):
            self._send_to_store(node, Release([msg.id]))
            return None
        if entry.mapping is None:
            self.map_block(msg.id, entry, msg.offset, msg.size, node)
        return entry

    def give_back(self, oid: bytes, node: int) -> None:
        """Release a pin that is not needed: the object is read in the memory of a node that is dead."""
        self._send_to_store(node, Release([oid]))

    def map_block(self, oid: bytes, entry: ObjectEntry, offset: int, size: int, node: int) -> None:
        """Note that the object lies there (offset and size in bytes), pinned for us."""
        entry.mapping = ArenaMapping(offset, size, node)
        self.mapped[oid] = entry

    def answered(self, oid: bytes) -> tuple[list[int], int]:
        """End a request: its answer has come.

        Returns:
            The nodes on which the object was looked for, and the node that got the Open.
        """
        if self._not_urgent:
            self._not_urgent.pop(oid, None)
        return self.opening.pop(oid, None) or ([], self._node)

    # ------------------------------------------------------------ files

    def lent(self, msg: OnDisk) -> ObjectEntry | None:
        """Our store has no room, but lets us read the object's file.

        Returns:
            The entry that this serves; None where no entry needs it, and the file goes back.
        """
        self.answered(msg.id)
        entry = self._entries.get(msg.id)
        if entry is None or entry.state in (LINEAGE_ONLY, INLINE) or entry.mapping is not None or msg.id in self.files:
            self._send(self._raylet, DiskRead(msg.id))
            return None
        self.files[msg.id] = (msg, 0)
        return entry

    def begin_file(self, oid: bytes) -> OnDisk:
        """A thread begins to read a file of `files`."""
        msg, readers = self.files[oid]
        self.files[oid] = (msg, readers + 1)
        return msg

    def end_file(self, oid: bytes) -> None:
        """The thread has read the file, or given up."""
        if oid in self._unreadable:
            self._return_unreadable(oid)
            return
        msg, readers = self.files[oid]
        self.files[oid] = (msg, readers - 1)
        if readers == 1:
            self._close_file(oid)

    def file_failed(self, oid: bytes, error: str) -> None:
        """The file could not be read: the store is to get the object otherwise, and answers as to an Open."""
        if oid in self.files:
            entry = self._entries.get(oid)
            self._unreadable[oid] = (*self.files.pop(oid), error)
            self.opening[oid] = (list(entry.nodes or ()) if entry is not None else [], self._node)
        self._return_unreadable(oid)

    def _return_unreadable(self, oid: bytes) -> None:
        """Count one reader less; the file must stay until no thread reads it."""
        msg, readers, error = self._unreadable.pop(oid)
        if readers > 1:
            self._unreadable[oid] = (msg, readers - 1, error)
        else:
            self._send(self._raylet, DiskRead(oid, error, msg.size, self.opening[oid][0]))

    def _close_file(self, oid: bytes) -> None:
        del self.files[oid]
        self._send(self._raylet, DiskRead(oid))

    def begin_view(self, oid: bytes) -> ArenaMapping | None:
        """Count a view of an object that is mapped; None where it is not."""
        mapping = self._entries[oid].extra.mapping
        if mapping is not None:
            mapping.views += 1
        return mapping

    def begin_write(self, oid: bytes, offset: int, size: int) -> None:
        """Count the view of a writer that fills a block of our own store in place; `end_write` takes it over."""
        mapping = self.views_without_entry[oid] = ArenaMapping(offset, size, self._node)
        mapping.views = 1

    def end_write(self, oid: bytes, entry: ObjectEntry) -> None:
        """Move the pin of `begin_write`, with the writer's views, to the entry of the object that was written."""
        entry.mapping = self.views_without_entry.pop(oid)
        self.mapped[oid] = entry

    def view_died(self, oid: bytes) -> None:
        """Uncount one view: the last buffer of one read died."""
        mapping = self.views_without_entry.get(oid)
        if mapping is not None:
            mapping.views -= 1
            if mapping.views == 0:
                del self.views_without_entry[oid]
                self._release(oid, mapping.node)
            return
        entry = self._entries.get(oid)
        if entry is not None and entry.mapping is not None:
            mapping = entry.mapping
            mapping.views -= 1
            if mapping.views == 0 and mapping.node in self._dead:
                entry.mapping = None
                del self.mapped[oid]
                self._release(oid, mapping.node)

    # ------------------------------------------------------------ giving back

    def give_up(self, size: int, node: int) -> None:
        """Release about `size` bytes of pins at a node that is short of room: pins without views, of objects that no
        thread is about to read."""
        if not self.mapped:
            return
        needed = {oid for oids in self.being_read for oid in oids}
        given = []
        for oid, entry in self.mapped.items():
            if size <= 0:
                break
            mapping = entry.mapping
            if mapping is not None and mapping.node == node and not mapping.views and oid not in needed:
                entry.mapping = None
                size -= mapping.size
                given.append(oid)
        for oid in given:
            del self.mapped[oid]
        if given:
            self._send_to_store(node, Release(given))

    def entry_gone(self, oid: bytes, mapping: ArenaMapping | None) -> None:
        """Release the pin of an object whose last ref died, or keep it for the views that live on."""
        self.refused.pop(oid, None)
        if oid in self.files and not self.files[oid][1]:
            self._close_file(oid)
        if mapping is None:
            return
        self.mapped.pop(oid, None)
        if mapping.views:
            self.views_without_entry[oid] = mapping
        else:
            self._release(oid, mapping.node)

    def _release(self, oid: bytes, node: int) -> None:
        if node not in self._dead:
            self._send_to_store(node, Release([oid]))
        elif node in self._reading:
            self._reading[node] -= 1
            if not self._reading[node]:
                self._stores.leave(node)

    def node_died(self, node: int) -> None:
        """Turn the mappings of a dead node into views without an entry.

        Its memory can be read as long as views of it live, but the objects are not there any more. `unmet` returns
        the requests that have to be repeated.
        """
        for oid in [oid for oid, entry in self.mapped.items() if entry.mapping and entry.mapping.node == node]:
            entry = self.mapped.pop(oid)
            mapping, entry.mapping = entry.mapping, None
            if mapping is not None and mapping.views:
                self.views_without_entry[oid] = mapping
        self._reading[node] = sum(mapping.node == node for mapping in self.views_without_entry.values())
        if not self._reading[node]:
            self._stores.leave(node)

    def check_invariants(self) -> None:
        """Raise AssertionError where pins, requests and the table's entries contradict each other."""
        mapped = {oid: entry for oid, entry in self._entries.items() if entry.mapping is not None}
        assert self.mapped == mapped, ("mapped entries", self.mapped.keys() ^ mapped.keys())
        for oid, mapping in self.views_without_entry.items():
            assert mapping.views > 0, ("a pin without entry and views", oid.hex())
        assert all(entry.mapping.views >= 0 for entry in mapped.values() if entry.mapping), "negative views"
        for _, readers in self.files.values():
            assert readers >= 0, self.files
        for oid in (*self._not_urgent, *self._unreadable):
            assert oid in self.opening, ("a request that is over", oid.hex())
        assert not self.files.keys() & self._unreadable.keys(), "a file is readable and unreadable"
        for node, parked in self._parked.items():
            assert parked and self._neighbors.get(node) is False, ("requests wait for no connection", node)
            for oid in parked:
                assert self.awaits(oid, node), ("a parked request is over", oid.hex(), node)
