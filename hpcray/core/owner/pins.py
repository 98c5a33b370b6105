"""One process's pins in its node's store: at most one per object, however many views, and one unanswered Open."""

from __future__ import annotations

from collections.abc import Callable

from hpcray.core.owner.entries import Entry, Mapping
from hpcray.wire.messages import Message, Open, Opened, Release


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
    """

    def __init__(self, raylet: bytes, send: Callable[[bytes, Message], None]) -> None:
        self.opening: dict[bytes, list[int]] = {}
        self.lingering: dict[bytes, Mapping] = {}
        self.mapped: dict[bytes, Entry] = {}
        self.gathering: list[list[bytes]] = []
        self.refused: dict[bytes, str] = {}
        self._raylet = raylet
        self._send = send

    def open(self, oid: bytes, entry: Entry) -> bool:
        """Get a stored object mapped for its entry; whether it is so at once, else `opened` or `failed` follows."""
        mapping = self.lingering.pop(oid, None)
        if mapping is not None:  # views of an earlier life of this ref hold the very pin
            entry.mapping = mapping
            self.mapped[oid] = entry
            return True
        if oid not in self.opening:
            nodes = self.opening[oid] = list(entry.nodes or ())
            self.refused.pop(oid, None)
            self._send(self._raylet, Open(oid, entry.size, nodes))
        return False

    def opened(self, msg: Opened, entry: Entry | None) -> bool:
        """The store pinned an object for us; whether anybody here still wants it."""
        self.opening.pop(msg.id, None)
        if entry is None:
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
        return self.opening.pop(oid, [])

    def entry_gone(self, oid: bytes, mapping: Mapping | None) -> None:
        """The last ref died: the pin goes, or stays for the views that live on."""
        self.refused.pop(oid, None)
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
