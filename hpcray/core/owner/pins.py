"""One process's pins in its node's store: at most one per object, however many views, and one unanswered Open."""

from __future__ import annotations

from collections.abc import Callable

from hpcray.core.owner.entries import FREED, INLINE, Entry, Mapping
from hpcray.wire.messages import DiskRead, Hurry, Message, OnDisk, Open, Opened, Release


class Pins:
    """What outlives the entries of a table: questions to the store, and pins that views still need.

    An entry may go (its last ref died) while the store's answer is under way, and come again before it is here. The
    answer then serves the new entry; without one the pin that it brought is given back at once. A Release never leaves
    before the Opened that it answers has come.

    A pin without views is kept, so that the next read costs nothing, until the store asks for it (`give_up`).

    Attributes:
        opening: objects with an Open under way, and the nodes that it named.
        lingering: pins whose entry is gone, held for the views that readers still have.
        mapped: entries with a pin, the one that got it first in front.
        gathering: lists of objects that somebody is about to read together: their pins stay.
        refused: why the store had no room for an object, until it is asked again.
        files: what the store lets us read from disk ourselves, for want of room, and how many threads are at it.
    """

    def __init__(self, raylet: bytes, send: Callable[[bytes, Message], None]) -> None:
        self.opening: dict[bytes, list[int]] = {}
        self.lingering: dict[bytes, Mapping] = {}
        self.mapped: dict[bytes, Entry] = {}
        self.gathering: list[list[bytes]] = []
        self.refused: dict[bytes, str] = {}
        self.files: dict[bytes, tuple[OnDisk, int]] = {}
        self._patient: dict[bytes, int] = {}  # of `opening`, those that are not urgent: their priority
        # Of `opening`, files that could not be read: how many threads still try, and why it failed first.
        self._unreadable: dict[bytes, tuple[OnDisk, int, str]] = {}
        self._raylet = raylet
        self._send = send

    def open(self, oid: bytes, entry: Entry, priority: int = 0) -> bool:
        """Get a stored object mapped for its entry; whether it is so at once, or can be read from disk, else `opened`,
        `lent` or `failed` follows."""
        mapping = self.lingering.pop(oid, None)
        if mapping is not None:  # views of an earlier life of this ref hold the very pin
            entry.mapping = mapping
            self.mapped[oid] = entry
            return True
        if oid in self.files:
            return True
        if oid not in self.opening:
            nodes = self.opening[oid] = list(entry.nodes or ())
            self.refused.pop(oid, None)
            if priority:
                self._patient[oid] = priority
            self._send(self._raylet, Open(oid, entry.size, nodes, priority))
        elif priority < self._patient.get(oid, 0):
            self._patient[oid] = priority
            self._send(self._raylet, Hurry(oid, priority))
        return False

    def opened(self, msg: Opened, entry: Entry | None) -> bool:
        """The store pinned an object for us; whether anybody here still wants it."""
        self._answered(msg.id)
        if entry is None or entry.state in (FREED, INLINE):
            self._send(self._raylet, Release([msg.id]))
            return False
        if entry.mapping is None:
            self.created(msg.id, entry, msg.offset, msg.size)
        return True

    def created(self, oid: bytes, entry: Entry, offset: int, size: int) -> None:
        """The object lies there, pinned for us."""
        entry.mapping = Mapping(offset, size)
        self.mapped[oid] = entry

    def give_up(self, size: int) -> None:
        """Room is short: release pins of about `size` bytes that no view needs and nobody is gathering."""
        if not self.mapped:
            return
        wanted = {oid for oids in self.gathering for oid in oids}
        given = []
        for oid, entry in self.mapped.items():
            if size <= 0:
                break
            mapping = entry.mapping
            if mapping is not None and not mapping.views and oid not in wanted:
                entry.mapping = None
                size -= mapping.size
                given.append(oid)
        for oid in given:
            del self.mapped[oid]
        if given:
            self._send(self._raylet, Release(given))

    def failed(self, oid: bytes) -> list[int]:
        """The store cannot give us the object; the nodes on which it was to look besides its own."""
        return self._answered(oid)

    def lent(self, msg: OnDisk, entry: Entry | None) -> bool:
        """There is no room in the store, but the object's file may be read; whether anybody here wants that."""
        self._answered(msg.id)
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
            self.opening[oid] = list(entry.nodes or ()) if entry is not None else []
        self._give_back_unreadable(oid)

    def _give_back_unreadable(self, oid: bytes) -> None:
        """One thread less is at it; what lies there must stay until none is."""
        msg, readers, error = self._unreadable.pop(oid)
        if readers > 1:
            self._unreadable[oid] = (msg, readers - 1, error)
        else:
            self._send(self._raylet, DiskRead(oid, error, msg.size, self.opening[oid]))

    def _close_file(self, oid: bytes) -> None:
        del self.files[oid]
        self._send(self._raylet, DiskRead(oid))

    def _answered(self, oid: bytes) -> list[int]:
        if self._patient:
            self._patient.pop(oid, None)
        return self.opening.pop(oid, [])

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
            self._send(self._raylet, Release([oid]))

    def view_died(self, oid: bytes, entry: Entry | None) -> None:
        """The last buffer of one read died."""
        mapping = self.lingering.get(oid)
        if mapping is not None:
            mapping.views -= 1
            if mapping.views == 0:
                del self.lingering[oid]
                self._send(self._raylet, Release([oid]))
        elif entry is not None and entry.mapping is not None:
            entry.mapping.views -= 1
