"""What a process does about objects that it reads, or wanted to read, in the stores of neighbouring nodes.

These are nodes of the same host: their memory is shared with us too, so nothing need be copied (`Pins`). They can be
lost like any other; and the connection to one can end while it lives, after which it is far like any other.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpcray.core.owner.entries import PENDING, STORED, Entry
from hpcray.core.owner.losing import Losing
from hpcray.core.owner.pins import Visits


class Near(Losing):
    """The part of an object table that has to do with neighbours."""

    def _ask(self, oid: bytes, entry: Entry) -> None:
        raise NotImplementedError

    def visit(self, nodes: Iterable[int], visits: Visits) -> None:
        """What is in the stores of these nodes can be read there."""
        self.pins.near = dict.fromkeys(nodes, False)
        self.pins.visits = visits

    def met(self, node: int) -> None:
        """We are connected to the store of one of them."""
        self.pins.met(node)

    def unmet(self, node: int) -> None:
        """We cannot be, or are not any more: what is there comes to us as from far."""
        self._ask_again(self.pins.unmet(node))

    def node_died(self, node: int, reason: str) -> None:
        """As of `Losing`; of a neighbour we have perhaps asked for something, and may be reading its memory."""
        self.dead_nodes.add(node)
        unanswered = self.pins.unmet(node)
        self.pins.node_died(node)
        super().node_died(node, reason)
        self._ask_again(unanswered)

    def _ask_again(self, oids: Iterable[bytes]) -> None:
        for oid in oids:
            entry = self.entries.get(oid)
            if entry is None:
                continue
            if oid in self._unsure and entry.state == STORED:
                self._make_sure(oid, entry)
            if entry.local_waiters and entry.state == STORED:
                self._ready(oid, entry)
            elif entry.local_waiters and entry.state == PENDING:  # no place is known any more
                self._ask(oid, entry)

    def _make_sure(self, oid: bytes, entry: Entry) -> None:
        """An object of `_unsure` is not looked for any more: it is to be looked for again."""
        left = [node for node in entry.nodes or () if node not in self.dead_nodes]
        if left:
            self._stays_at(oid, entry, left[0])
        else:
            self.pins.ask(oid, entry)

    def _not_near(self, oid: bytes, entry: Entry, node: int, reason: str) -> None:
        """The store of a neighbour does not have an object that we wanted to read there."""
        if not [n for n in entry.nodes or () if n != node and n not in self.dead_nodes]:
            self._not_there(oid, entry, [node], reason)
            return
        known = entry.nodes is not None and node in entry.nodes
        first = known and self._not_at(entry, node)
        if oid[:8] == self.me:
            if known:
                entry.left_at = [*(entry.left_at or ()), node]  # perhaps it is there after all
            if first or oid in self._unsure:
                self._first_is_gone(oid, entry, reason)
        if entry.state == STORED:
            self._ready(oid, entry)
