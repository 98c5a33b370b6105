"""Long frames to and from other nodes, in memory that a process shares with its raylet (`core.raylet.frame_slots`)."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from hpcray.common.ids import node_of, number_of, raylet_of
from hpcray.platform.arena import Arena
from hpcray.protocol import messages as m
from hpcray.protocol.frames import HEADER, SLOT_BYTES, pack
from hpcray.runtime.core_worker.context import CoreWorkerContext


class FrameSlotClient:
    """The frame slots of one process. Lock held in all methods.

    Args:
        arena: of the own node, with its reserve.
    """

    def __init__(self, context: CoreWorkerContext, arena: Arena) -> None:
        engine = self._engine = context.engine
        self._context = context
        self._arena = arena
        self._node = node_of(engine.me)
        self._raylet = raylet_of(self._node)
        self._granted: list[int] = []
        engine.links.frame_writers.append(self)

    def share(self, dest: bytes, pieces: Sequence[bytes], size: int) -> bytes | None:
        """Write a frame into a slot.

        Args:
            dest: the process that it is for.
            pieces: of the frame.
            size: their bytes, all together.

        Returns:
            The frame that is to be sent to the raylet instead; None: there is no slot, or the receiver is of this node.
        """
        if not self._granted or size > SLOT_BYTES or node_of(dest) == self._node or not number_of(dest):
            return None
        offset = self._granted.pop()
        slot = self._arena.view(offset, size)
        at = 0
        for piece in pieces:
            end = at + len(piece)
            slot[at:end] = piece
            at = end
        return pack(self._raylet, self._engine.me, m.encode([m.SlotFrame(offset, size)]))

    def on_slots(self, src: bytes, msg: m.FrameSlots) -> None:
        """The raylet has granted slots."""
        if src == self._raylet:
            self._granted += msg.offsets

    def on_reclaim(self, src: bytes, msg: m.ReclaimFrameSlots) -> None:
        """Another process needs slots."""
        returned, self._granted = self._granted, []
        self._engine.send(self._raylet, m.FrameSlotsReturned(returned))

    def on_frame(self, src: bytes, msg: m.SlotFrame) -> None:
        """Handle the messages of a frame from another node."""
        if src != self._raylet:
            return
        frame = self._arena.view(msg.offset, msg.size)
        self._engine.send(self._raylet, m.FrameRead(msg.offset))  # leaves at the end of the turn
        source, handlers = bytes(frame[12:20]), self._context.handlers
        for message in m.decode(frame[HEADER:]):
            try:
                handlers[type(message)](source, message)
            except Exception:
                traceback.print_exc()  # as in `IoEngine`: a defect must not cost the messages behind this one
