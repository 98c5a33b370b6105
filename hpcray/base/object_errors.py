"""What the system reports of objects. `base.errors` has all errors."""

from __future__ import annotations

from typing import Any

from hpcray.base.failures import RayError


class GetTimeoutError(RayError, TimeoutError):
    """The value was not there within the timeout."""


class PlasmaObjectNotAvailable(RayError):
    """The object was not in the node store within the timeout."""


class OufOfBandObjectRefSerializationException(RayError):
    """An ObjectRef was pickled outside of task arguments, where its owner cannot count it."""


class ObjectStoreFullError(RayError):
    """The node store is full of objects that are still in use."""

    def __str__(self) -> str:
        text = super().__str__()
        if "hint:" in text:  # the store knows more
            return text
        return f"{text}\nhint: drop references that are not needed, or raise object_store_memory"


class OutOfDiskError(RayError):
    """The node store is full and so is the disk it spills to."""

    def __str__(self) -> str:
        return super().__str__() + "\nhint: free space on the node's local disk (`df`), or spill somewhere else"


class ObjectLostError(RayError):
    """No copy of the object is left.

    Attributes:
        object_ref_hex: the object's id.
        owner_address: the owner's process, where known.
        call_site: where the reference was made, where known.
        details: how it was lost, where known.
    """

    WHY = "All copies of the object are lost."

    def __init__(self, object_ref_hex: str, owner_address: Any = None, call_site: str = "", details: str = "") -> None:
        super().__init__(object_ref_hex, owner_address, call_site, details)
        self.object_ref_hex = object_ref_hex
        self.owner_address = owner_address
        self.call_site = call_site
        self.details = details

    def _why(self) -> str:
        return f"{self.WHY} {self.details}".rstrip()

    def __str__(self) -> str:
        text = f"Failed to retrieve object {self.object_ref_hex}. {self._why()}"
        return f"{text}\nThe ObjectRef was created at: {self.call_site}" if self.call_site else text


class ObjectFetchTimedOutError(ObjectLostError):
    """The object could not be fetched in time."""

    WHY = "Fetching it took too long: no node could send a copy."


class ReferenceCountingAssertionError(ObjectLostError, AssertionError):
    """The object was freed while a reference to it was left; a bug of hpcray."""

    WHY = "It was freed while a reference to it was left. This is a bug of hpcray."


class ObjectFreedError(ObjectLostError):
    """The object was freed by hand."""

    WHY = "It was freed by hand. hint: call `free` only when no reference is needed any more."


class OwnerDiedError(ObjectLostError):
    """The process that owned the object is gone."""

    WHY = "Its owner, the process that created the reference, is gone."

    def _why(self) -> str:
        why = super()._why()
        return f"{why} Owner: {self.owner_address}." if self.owner_address else why


class ObjectReconstructionFailedError(ObjectLostError):
    """The object is lost and cannot be made again.

    Attributes:
        reason: why, as a name (for example "MAX_ATTEMPTS_EXCEEDED"), or None.
        reason_message: why, in words.
    """

    WHY = "It cannot be made again."

    def __init__(
        self,
        object_ref_hex: str,
        reason: Any = None,
        reason_message: str | None = None,
        owner_address: Any = None,
        call_site: str = "",
    ) -> None:
        super().__init__(object_ref_hex, owner_address, call_site)
        self.reason = reason
        self.reason_message = reason_message or self.WHY

    def _why(self) -> str:
        return f"[{self.reason or 'UNKNOWN'}] {self.reason_message}"


class ObjectReconstructionFailedMaxAttemptsExceededError(ObjectReconstructionFailedError):
    """The task that makes the object has no retries left."""

    WHY = "The task that makes it has used up its retries. hint: raise max_retries."


class ObjectReconstructionFailedLineageEvictedError(ObjectReconstructionFailedError):
    """What would make the object again is forgotten."""

    WHY = "The description of the task that made it was dropped to save memory."
