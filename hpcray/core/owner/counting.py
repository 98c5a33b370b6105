"""Local references: how many refs to each object live in this process, and what happens when the last one goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from hpcray.core.owner.entries import INLINE, PENDING, Entry, Waiter
from hpcray.core.owner.lineage import LOST
from hpcray.core.owner.near import Near
from hpcray.wire.messages import Free, Message

_FREED_HERE = "its owner (this process) has already freed it"


class Counting(Near):
    """The part of an object table that counts.

    Attributes:
        on_free: called when an object of ours is freed; see `when_freed`.
    """

    def __init__(
        self,
        me: bytes,
        send: Callable[[bytes, Message], None],
        notify: Callable[[Waiter], None],
        lost: Callable[[bytes, str, str], bytes],
        lineage_limit: int,
    ) -> None:
        super().__init__(me, send, notify, lost, lineage_limit)
        self.on_free: dict[bytes, Callable[[], None]] = {}

    def create(self, oid: bytes, task: Any = None) -> Entry:
        """A new object that we own, still pending."""
        entry = self.entries[oid] = Entry(task)
        return entry

    def abandon(self, oid: bytes) -> None:
        """An object that we created will not come to be, and no ref to it has left this thread."""
        self.entries.pop(oid, None)

    def arrived(self, oid: bytes, protected: list[bytes] | None) -> None:
        """A ref to `oid` was deserialized: count it, and borrow the object if it is not ours.

        Args:
            protected: the running task's list of refs that its submitter protects (rule 2), or None (rule 3).
        """
        entry = self.entries.get(oid)
        if entry is None:
            entry = self.entries[oid] = Entry()
            entry.local = 1
            if oid[:8] == self.me:
                self.settle_lost(oid, entry, _FREED_HERE, LOST)
            elif protected is None:
                self._register([oid])
            else:
                self._unregistered.add(oid)
        else:
            entry.local += 1
        if protected is not None and oid in self._unregistered:
            protected.append(oid)

    def adopt(self, oid: bytes, giver: bytes) -> None:
        """A ref to `oid` came inside a value that `giver` returned to us; it had the object kept for us (`give`)."""
        entry = self.entries.get(oid)
        mine = oid[:8] == self.me
        self._take(oid, giver)
        if entry is None:
            entry = self.entries[oid] = Entry()
            entry.local = 1
            if mine:
                self.settle_lost(oid, entry, _FREED_HERE, LOST)
            return
        entry.local += 1
        if oid in self._unregistered:
            self._unregistered.discard(oid)
        elif not mine:
            self._drop(oid)  # it was counted once already

    def release(self, oid: bytes) -> None:
        """One local ref died."""
        entry = self.entries.get(oid)
        if entry is None:
            return
        entry.local -= 1
        if entry.local <= 0:
            self._maybe_free(oid, entry)

    def bury(self, died: deque[Any]) -> None:
        """Refs (ids) and views (1-tuples of ids) died: empty `died`, also of those that die meanwhile."""
        entries, me, special = self.entries, self.me, self.special
        while died:
            oid = died.popleft()
            if type(oid) is not bytes:
                self.view_died(oid[0])
                continue
            entry = entries.get(oid)
            if entry is None:
                continue
            entry.local -= 1
            if entry.local > 0:
                continue
            if (
                entry.state == INLINE and oid not in special and oid.startswith(me)
                and not (entry.size or entry.nodes or entry.borrowers or entry.left_at or entry.mapping)
            ):  # fmt: skip
                del entries[oid]  # a small value of ours, which nobody else knows of
            else:
                self._maybe_free(oid, entry)
            entry = None  # refs in its value die here, not after the loop

    def view_died(self, oid: bytes) -> None:
        """The last buffer of one read of `oid` died."""
        self.pins.view_died(oid, self.entries.get(oid))

    def _maybe_free(self, oid: bytes, entry: Entry) -> None:
        if entry.local > 0 or self.entries.get(oid) is not entry:
            return  # not there any more: a signal handler, or a destructor, of the user's had refs buried meanwhile
        if oid[:8] == self.me:
            if entry.state == PENDING or entry.borrowers:
                return  # its task still runs: `_ready` comes back here; so do the ends of borrows
            if entry.nodes or entry.left_at:
                self._send(self._raylet, Free([oid], [*(entry.nodes or ()), *(entry.left_at or ())]))
            special = oid in self.special
            if special and self._outlives(oid, entry):
                return
        else:
            special = oid in self.special
            if oid in self._unregistered:
                self._unregistered.discard(oid)
            else:
                self._drop(oid)
        del self.entries[oid]
        if entry.mapping is not None or self.pins.refused or self.pins.files:
            self.pins.entry_gone(oid, entry.mapping)
        if special:
            self.dropped(oid, entry)
            if oid in self.on_free:
                self.on_free.pop(oid)()

    def _outlives(self, oid: bytes, entry: Entry) -> bool:
        """Whether the entry of a freed object of ours stays, for the sake of lineage."""
        self.replicas.gone(oid)
        if oid not in self.lineage.remembered:
            return False
        self.hibernate(oid, entry)
        if oid in self.on_free:
            self.on_free.pop(oid)()
        return True

    def when_freed(self, oid: bytes, call: Callable[[], None]) -> None:
        """Make this call when an object of ours is freed."""
        self.special.add(oid)
        self.on_free[oid] = call
