"""Objects past the store: what neither fits into the arena nor can wait for room lies in a file that processes map."""

from __future__ import annotations

from hpcray.common.overflow import OVERFLOW
from hpcray.core.effects import Effect, ReleaseOverflow, ReserveOverflow
from hpcray.core.object_store.allocator import LARGE, Allocator
from hpcray.core.object_store.stored_object import StoredObject, StoredObjectState

_PREFIX = b"overflow"


class OverflowFile:
    """Hands out ranges of the overflow file. The disk space of a range is reserved before it is written through a
    mapping: a write that finds the disk full would kill its process.

    Args:
        size: bytes that may be handed out; 0: there is no such file.
    """

    def __init__(self, size: int) -> None:
        self._blocks = Allocator(size) if size else None
        self._reserving: dict[bytes, StoredObject] = {}

    @property
    def enabled(self) -> bool:
        """True if there is such a file."""
        return self._blocks is not None

    @property
    def used(self) -> int:
        """Bytes handed out."""
        return self._blocks.used if self._blocks is not None else 0

    def reserve(self, obj: StoredObject, out: list[Effect]) -> bool:
        """Begin to give a WAITING object a range; False: there is none."""
        position = self._blocks.allocate(max(LARGE, obj.size)) if self._blocks is not None else None
        if position is None:
            return False
        obj.offset = OVERFLOW + position
        obj.change_state(StoredObjectState.RESERVING)
        name = _PREFIX + position.to_bytes(8, "big")
        self._reserving[name] = obj
        out.append(ReserveOverflow(name, position, obj.size))
        return True

    def owns(self, name: bytes) -> bool:
        """True for the name of a ReserveOverflow that has not ended."""
        return name in self._reserving

    def reserving(self) -> list[StoredObject]:
        """The objects of the store whose ranges are being reserved."""
        return [obj for obj in self._reserving.values() if not obj.forgotten]

    def reserve_ended(self, name: bytes, out: list[Effect]) -> StoredObject | None:
        """The ReserveOverflow is over: the object; None: it has left the store meanwhile, and its range goes now."""
        obj = self._reserving.pop(name)
        if obj.state is StoredObjectState.RESERVING and not obj.forgotten:
            return obj
        self.release(obj, out)
        return None

    def release(self, obj: StoredObject, out: list[Effect]) -> None:
        """The range of an object is not needed any more. One that is being reserved goes when that has ended."""
        position = obj.offset - OVERFLOW
        if _PREFIX + position.to_bytes(8, "big") in self._reserving:
            obj.forgotten = True
            return
        assert self._blocks is not None
        self._blocks.free(position)
        out.append(ReleaseOverflow(position, obj.size))
        obj.offset = -1

    def check_invariants(self, holders: list[StoredObject]) -> None:
        """Every range belongs to one of these objects, or to one that left while its range was being reserved."""
        left = [obj for obj in self._reserving.values() if obj.forgotten]
        offsets = sorted(obj.offset - OVERFLOW for obj in [*holders, *left])
        blocks = self._blocks.blocks() if self._blocks is not None else {}
        assert offsets == sorted(blocks), f"ranges past the store at {sorted(blocks)}, objects at {offsets}"
        for name, obj in self._reserving.items():
            assert obj.forgotten or obj.state is StoredObjectState.RESERVING, f"{name!r} is reserved for no object"
