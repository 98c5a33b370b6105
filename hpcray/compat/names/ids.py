"""Ray's id classes. hpcray's own ids are bytes or hex text; these are for programs that make or name ids."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hpcray.api.placement_group import PlacementGroupID as _OwnPlacementGroupID
from hpcray.base.ids import ActorID as _OwnActorID

if TYPE_CHECKING:
    from typing_extensions import Self


class BaseID(bytes):
    """An id: bytes, with Ray's ways in and out."""

    __slots__ = ()
    SIZE = 28

    @classmethod
    def from_hex(cls, text: str) -> Self:
        """The id with this hex text."""
        return cls(bytes.fromhex(text))

    @classmethod
    def from_binary(cls, data: bytes) -> Self:
        """The id with these bytes."""
        return cls(data)

    @classmethod
    def from_random(cls) -> Self:
        """A new id."""
        return cls(os.urandom(cls.SIZE))

    @classmethod
    def nil(cls) -> Self:
        """The id of nothing."""
        return cls(b"\xff" * cls.SIZE)

    @classmethod
    def size(cls) -> int:
        """Bytes of an id."""
        return cls.SIZE

    def binary(self) -> bytes:
        """The id's bytes."""
        return bytes(self)

    def is_nil(self) -> bool:
        """Whether it names nothing."""
        return not self or self == b"\xff" * len(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.hex()})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (bytes(self),)


class _OrOwn(type):
    """`isinstance` also takes hpcray's own id objects of the kind."""

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
        """The id with this number."""
        return cls(number.to_bytes(cls.SIZE, "little"))

    def int(self) -> int:
        """The number."""
        return int.from_bytes(self, "little")


class TaskID(BaseID):
    """Id of a task."""

    SIZE = 24


class ActorID(BaseID, metaclass=_OrOwn):
    """Id of an actor. `handle._actor_id` is one."""

    SIZE = 16
    own = _OwnActorID


class PlacementGroupID(BaseID, metaclass=_OrOwn):
    """Id of a placement group. `group.id` is one."""

    SIZE = 18
    own = _OwnPlacementGroupID
