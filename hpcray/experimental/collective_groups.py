"""Collective groups of actors that their creator knows: made, found and ended from outside.

Names are those of `ray.experimental.collective`.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from typing import Any

from hpcray.api.objects import get
from hpcray.common.exceptions import ActorDiedError
from hpcray.util import collective
from hpcray.util.collective import Backend


class CommunicatorHandle:
    """A group of actors, in the order of their ranks.

    Attributes:
        name: of the group. backend: how its operations run.
    """

    def __init__(self, actors: Sequence[Any], name: str, backend: str) -> None:
        self._actors = list(actors)
        self.name = name
        self.backend = Backend(backend)

    @property
    def actors(self) -> list[Any]:
        """The handles of its actors."""
        return self._actors[:]

    def get_rank(self, actor: Any) -> int:
        """Return the rank of an actor; -1 for one that is not in the group."""
        return self._actors.index(actor) if actor in self._actors else -1


_groups: dict[str, CommunicatorHandle] = {}


def create_collective_group(actors: Sequence[Any], backend: str, name: str | None = None) -> CommunicatorHandle:
    """Make a group of these actors and wait until all have joined.

    Args:
        actors: handles, in the order of the ranks. backend: "gloo" or "nccl". name: of the group; None: any.

    Raises:
        RuntimeError: an actor is in a group of this backend already, or could not join.
        ValueError: the backend is unknown, or an actor is there twice.
    """
    kind = Backend(backend)
    for actor in actors:
        if get_collective_groups([actor], kind):
            raise RuntimeError(
                f"Actor {actor} already in group for backend {kind}. Actors can currently only participate in at most "
                "one group per backend. hint: destroy_collective_group"
            )
    if len(set(actors)) != len(actors):
        raise ValueError(f"All actors must be unique, got: {actors}")
    name = str(uuid.uuid4()) if name is None else name
    get([actor.__ray_call__.remote(_join, len(actors), rank, kind, name) for rank, actor in enumerate(actors)])
    made = _groups[name] = CommunicatorHandle(actors, name, kind)
    return made


def get_collective_groups(actors: Sequence[Any] | None = None, backend: str | None = None) -> list[CommunicatorHandle]:
    """Return the groups of this process that have all these actors, and this backend if one is given."""
    wanted, kind = set(actors or ()), None if backend is None else Backend(backend)
    return [
        group for group in _groups.values() if wanted.issubset(group.actors) and (kind is None or group.backend == kind)
    ]


def destroy_collective_group(group_or_name: CommunicatorHandle | str) -> None:
    """End a group; its actors can be in another one then. Dead actors are left out.

    Raises:
        ValueError: this process has made no such group.
    """
    if not isinstance(group_or_name, CommunicatorHandle | str):
        raise ValueError("Expected CommunicatorHandle or str (group name).")
    name = group_or_name if isinstance(group_or_name, str) else group_or_name.name
    group = _groups.pop(name, None)
    if group is None:
        raise ValueError(f"No group with name {name} found.")
    left = [actor.__ray_call__.options(concurrency_group="_ray_system").remote(_leave, name) for actor in group.actors]
    for ref in left:
        with contextlib.suppress(ActorDiedError):
            get(ref)


def destroy_all_collective_groups() -> None:
    """End all groups that this process has made."""
    for name in list(_groups):
        destroy_collective_group(name)


def _join(_: Any, world_size: int, rank: int, backend: str, name: str) -> None:
    collective.init_collective_group(world_size, rank, backend, name)


def _leave(_: Any, name: str) -> None:
    collective.destroy_collective_group(name)
