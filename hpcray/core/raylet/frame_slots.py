"""Slots of the memory in which a raylet and its processes hand each other long frames: which process may write which.

A long frame that goes through a socket is copied into the kernel and out of it again, at the sender's node and at the
receiver's. In a slot of shared memory it lies where both the process and the wire between the nodes can read it. A slot
is free, *granted* to a process, which may fill it once, or *busy*: it holds a frame that this process has filled, or
that comes from another node, until nothing of it is read any more.

Slots only make frames faster: where none is free, a frame goes through the socket. So no process waits for one, and at
most half of them are for frames that leave, lest frames that arrive find none.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcray.core.effects import Effect, Send
from hpcray.protocol.messages import FrameSlots, ReclaimFrameSlots

SLOT_COUNT = 32
GRANT = 4
"""Slots that a process gets at a time: while one leaves, the next ones are filled."""

_NO_PROCESS = b""


class FrameSlotManager:
    """The slots of one node.

    Args:
        offsets: where they are.
    """

    def __init__(self, offsets: Sequence[int]) -> None:
        self._offsets = frozenset(offsets)
        self._free = list(offsets)
        self._granted: dict[bytes, list[int]] = {}  # the process that has filled one least recently comes first
        self._busy: dict[int, bytes] = {}
        self._outgoing = 0  # slots that are granted, or hold what a process has filled
        self._reclaimed: set[bytes] = set()
        self._most_outgoing = len(self._free) // 2

    def grant(self, proc: bytes) -> list[Effect]:
        """The process sends long frames to other nodes: it gets slots, as far as there are any."""
        held = self._granted.setdefault(proc, [])
        if len(held) > GRANT // 2:
            return []
        self._granted[proc] = self._granted.pop(proc)
        count = min(GRANT - len(held), len(self._free), self._most_outgoing - self._outgoing)
        if count > 0:
            # The last ones first: memory that was used lately is mapped, and in the processor's caches.
            granted = [self._free.pop() for _ in range(count)]
            self._outgoing += count
            held += granted
            return [Send(proc, FrameSlots(granted))]
        if held:
            return []
        del self._granted[proc]
        for other, slots in self._granted.items():
            if slots and other not in self._reclaimed:
                self._reclaimed.add(other)
                return [Send(other, ReclaimFrameSlots())]
        return []

    def fill(self, proc: bytes, offset: int) -> bool:
        """The process has written a frame into a slot. Returns False where the slot is not its own."""
        held = self._granted.get(proc)
        if held is None or offset not in held:
            return False
        held.remove(offset)
        self._busy[offset] = proc
        return True

    def take(self) -> int:
        """A slot for a frame that arrives from another node; -1: none is free."""
        if not self._free:
            return -1
        offset = self._free.pop()
        self._busy[offset] = _NO_PROCESS
        return offset

    def release(self, offset: int) -> None:
        """Nothing of the frame in this slot is read any more."""
        if self._busy.pop(offset) != _NO_PROCESS:
            self._outgoing -= 1
        self._free.append(offset)

    def give_back(self, proc: bytes, offsets: Sequence[int]) -> None:
        """The process does not need these now."""
        self._reclaimed.discard(proc)
        held = self._granted.get(proc, [])
        for offset in offsets:
            if offset in held:
                held.remove(offset)
                self._outgoing -= 1
                self._free.append(offset)
        if not held:
            self._granted.pop(proc, None)

    def process_died(self, proc: bytes) -> None:
        """Free what the process has not filled. What it has filled still travels."""
        self.give_back(proc, list(self._granted.get(proc, ())))

    def check_invariants(self) -> None:
        """Every slot is free, or granted to one process, or busy."""
        granted = [offset for held in self._granted.values() for offset in held]
        everything = [*self._free, *granted, *self._busy]
        assert len(everything) == len(set(everything)), f"a slot has two users: {everything}"
        assert set(everything) == self._offsets, f"slots {self._offsets.difference(everything)} are lost"
        filled = sum(proc != _NO_PROCESS for proc in self._busy.values())
        assert self._outgoing == len(granted) + filled, f"{self._outgoing} outgoing, {len(granted)} + {filled}"
        assert self._outgoing <= self._most_outgoing, f"{self._outgoing} slots are outgoing"
