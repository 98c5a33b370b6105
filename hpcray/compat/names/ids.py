"""Ids of `ray._raylet`: bytes with Ray's conversions."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

from hpcray.api.placement_group import PlacementGroupID as _OwnPlacementGroupID
from hpcray.common.ids import ActorID as _OwnActorID
from hpcray.common.ids import Ident

if TYPE_CHECKING:
    from typing_extensions import Self


class BaseID(Ident):
    """Base class of ids: bytes with Ray's conversions."""

    __slots__ = ()
    SIZE = 28

    @classmethod
    def from_hex(cls, text: str) -> Self:
        return cls(bytes.fromhex(text))

    @classmethod
    def from_binary(cls, data: bytes) -> Self:
        return cls(data)

    @classmethod
    def from_random(cls) -> Self:
        return cls(os.urandom(cls.SIZE))

    @classmethod
    def nil(cls) -> Self:
        return cls(b"\xff" * cls.SIZE)

    @classmethod
    def size(cls) -> int:
        return cls.SIZE

    def __eq__(self, other: object) -> bool:
        # An id of another kind is another thing, whatever its bytes are.
        return bytes(self) == other and (not isinstance(other, BaseID) or type(other) is type(self))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = Ident.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (bytes(self),)


class _OrOwn(type):
    """Metaclass: hpcray's own class of the same ids also passes `isinstance`."""

    own: type

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or isinstance(instance, cls.own)


class UniqueID(BaseID):
    """Any id of 28 bytes."""


class NodeID(UniqueID):
    """Id of a node."""


class WorkerID(UniqueID):
    """Id of a process."""


class ClusterID(UniqueID):
    """Id of a job's session."""


class FunctionID(UniqueID):
    """Id of a remote function."""


class ActorClassID(UniqueID):
    """Id of an actor class."""


class JobID(BaseID):
    """Id of a job."""

    SIZE = 4

    @classmethod
    def from_int(cls, number: int) -> Self:
        return cls(number.to_bytes(cls.SIZE, "little"))

    def int(self) -> int:
        return int.from_bytes(self, "little")


class TaskID(BaseID):
    """Id of a task, made as Ray makes it: 8 bytes of its own, then the id of its actor. hpcray's own are shorter."""

    SIZE = 24

    @classmethod
    def for_driver_task(cls, job_id: bytes) -> Self:
        """Return the id that stands for the driver of a job."""
        return cls(_NIL[: cls.SIZE - JobID.SIZE] + job_id)

    @classmethod
    def for_fake_task(cls, job_id: bytes) -> Self:
        """Return a random id of a task of a job."""
        return cls(os.urandom(_UNIQUE) + _NIL[: ActorID.SIZE - JobID.SIZE] + job_id)

    @classmethod
    def for_normal_task(cls, job_id: bytes, parent_task_id: bytes, parent_task_counter: int) -> Self:
        """Return the id of a task, by what submitted it."""
        own = _digest(job_id, parent_task_id, parent_task_counter)[:_UNIQUE]
        return cls(own + _NIL[: ActorID.SIZE - JobID.SIZE] + job_id)

    @classmethod
    def for_actor_creation_task(cls, actor_id: bytes) -> Self:
        """Return the id of the creation of an actor."""
        return cls(_NIL[:_UNIQUE] + actor_id)

    @classmethod
    def for_actor_task(cls, job_id: bytes, parent_task_id: bytes, parent_task_counter: int, actor_id: bytes) -> Self:
        """Return the id of a call, by what submitted it and the actor."""
        return cls(_digest(job_id, parent_task_id, parent_task_counter)[:_UNIQUE] + actor_id)

    def actor_id(self) -> ActorID:
        """Return the id of the actor; without one, nil but for the job."""
        return ActorID(self[_UNIQUE:])

    def job_id(self) -> JobID:
        """Return the id of the job."""
        return JobID(self[-JobID.SIZE :])


class ActorID(BaseID, metaclass=_OrOwn):
    """Id of an actor. `handle._actor_id` is one, though shorter than Ray's."""

    SIZE = 16
    own = _OwnActorID

    @classmethod
    def of(cls, job_id: bytes, parent_task_id: bytes, parent_task_counter: int) -> Self:
        """Return the id of an actor, by what created it."""
        return cls(_digest(job_id, parent_task_id, parent_task_counter)[: cls.SIZE - JobID.SIZE] + job_id)

    @property
    def job_id(self) -> JobID:
        """Id of the job."""
        return JobID(self[-JobID.SIZE :])


class PlacementGroupID(BaseID, metaclass=_OrOwn):
    """Id of a placement group. `group.id` is one, though shorter than Ray's."""

    SIZE = 18
    own = _OwnPlacementGroupID

    @classmethod
    def of(cls, job_id: bytes) -> Self:
        """Return a random id of a placement group of a job."""
        return cls(os.urandom(cls.SIZE - JobID.SIZE) + job_id)


_UNIQUE = 8  # bytes of a task's id before its actor's
_NIL = b"\xff" * BaseID.SIZE


def _digest(job_id: bytes, parent_task_id: bytes, counter: int) -> bytes:
    return hashlib.sha256(job_id + parent_task_id + counter.to_bytes(8, "little")).digest()
