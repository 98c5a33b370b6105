"""Long frames between the processes of a node and other nodes, in memory that the raylet and its processes share.

The raylet forwards a frame that a process has written there without a copy, and has the wire receive frames for a
process there. How long a slot is in use is seen at the views into it: whatever holds the frame (a batch, a send under
way, a link) holds a view.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from hpcray.common.memory import BufferPool
from hpcray.core.effects import Effect
from hpcray.core.raylet.frame_slots import FrameSlotManager
from hpcray.platform.arena import Arena
from hpcray.protocol import messages as m
from hpcray.protocol.frames import HEADER, LENGTH, SLOT_BYTES, FrameError
from hpcray.runtime.raylet.router import Router

_NOTHING: tuple[()] = ()


class FrameSlotRouter:
    """See the module.

    Args:
        arena: with its reserve, in which the slots are.
        offsets: of the slots.
    """

    def __init__(self, arena: Arena, offsets: list[int], router: Router) -> None:
        self._arena = arena
        self._slots = FrameSlotManager(offsets)
        self._router = router
        self._private = BufferPool()
        self._at: dict[int, int] = {}  # offset by the identity of what the views of a slot view
        self._identity: dict[int, int] = {}
        self._lent: dict[bytes, dict[int, memoryview]] = {}  # by reader and offset

    def take(self, size: int) -> memoryview:
        """Memory for a frame that arrives from another node: shared, if there is a slot. See `BufferPool.take`."""
        offset = self._slots.take() if size <= SLOT_BYTES else -1
        return self._private.take(size) if offset < 0 else self._view(offset)[:size]

    def offset_of(self, batch: Any) -> int:
        """Where in the arena the memory is that `take` gave; -1: it is not shared."""
        return self._at.get(id(batch.obj), -1) if type(batch) is memoryview else -1

    def deliver(self, dest: bytes, src: bytes, frame: memoryview, offset: int) -> bool:
        """Pass on a frame at this offset to a process of this node, which reads it there. Returns False for a process
        that has none of this memory."""
        if not self._router.refer(dest, src, m.SlotFrame(offset, len(frame))):
            return False
        self._lent.setdefault(dest, {})[offset] = frame
        return True

    def sent_long(self, proc: bytes) -> list[Effect]:
        """A process has sent a long frame to another node through its socket."""
        return self._slots.grant(proc)

    def process_died(self, proc: bytes) -> None:
        """A process of this node reads and writes no more."""
        self._lent.pop(proc, None)
        self._slots.process_died(proc)

    # ------------------------------------------------------------ messages of processes

    def on_slot_frame(self, now: float, src: bytes, msg: m.SlotFrame) -> Iterable[Effect]:
        """Forward the frame that a process has written into a slot.

        Raises:
            FrameError: the slot is not its own, or no frame is there.
        """
        if not HEADER <= msg.size <= SLOT_BYTES or not self._slots.fill(src, msg.offset):
            raise FrameError(f"it has no frame of {msg.size} bytes at {msg.offset}")
        frame = self._view(msg.offset)[: msg.size].toreadonly()
        if LENGTH.unpack_from(frame)[0] + 4 != msg.size:
            raise FrameError(f"the frame at {msg.offset} has not the {msg.size} bytes that were announced")
        self._router.forward(bytes(frame[4:12]), src, frame)
        return self._slots.grant(src)

    def on_frame_read(self, now: float, src: bytes, msg: m.FrameRead) -> Iterable[Effect]:
        """A process has read a frame."""
        self._lent.get(src, {}).pop(msg.offset, None)
        return _NOTHING

    def on_returned(self, now: float, src: bytes, msg: m.FrameSlotsReturned) -> Iterable[Effect]:
        """A process does without its slots."""
        self._slots.give_back(src, msg.offsets)
        return _NOTHING

    def _view(self, offset: int) -> memoryview:
        view, identity = self._arena.borrowed_view(offset, SLOT_BYTES, partial(self._unused, offset))
        self._at[identity] = offset
        self._identity[offset] = identity
        return view

    def _unused(self, offset: int) -> None:
        del self._at[self._identity.pop(offset)]
        self._slots.release(offset)
