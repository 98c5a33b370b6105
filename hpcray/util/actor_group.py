"""Actors of one class that are called together."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcray.api.accelerators import get_gpu_ids
from hpcray.api.actor import ActorClass, ActorHandle, kill
from hpcray.api.context import get_runtime_context
from hpcray.api.decorator import remote
from hpcray.api.objects import get, wait
from hpcray.host.address import node_ip_address
from hpcray.runtime.refs import ObjectRef


@dataclass
class ActorMetadata:
    """Where an actor of a group runs."""

    node_id: str
    node_ip: str
    hostname: str
    gpu_ids: list[Any] = field(default_factory=list)


def _metadata_here(_actor: Any) -> ActorMetadata:
    """What an actor says about itself."""
    return ActorMetadata(get_runtime_context().get_node_id(), node_ip_address(), socket.gethostname(), get_gpu_ids())


class ActorGroupMethod:
    """A method of every actor of a group."""

    def __init__(self, group: ActorGroup, name: str) -> None:
        self._group, self._name = group, name

    def remote(self, *args: Any, **kwargs: Any) -> list[ObjectRef[Any]]:
        """Call it on every actor with the same arguments; the refs, in the actors' order."""
        return [getattr(actor, self._name).remote(*args, **kwargs) for actor in self._group.actors]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"ActorGroup methods cannot be called directly. Instead of running 'object.{self._name}()', try "
            f"'object.{self._name}.remote()'."
        )


class ActorGroup:
    """Actors of one class, made, called and ended together: `group.method.remote(...)` calls all of them.

    Args:
        actor_cls: a plain class.
        num_actors: how many.
        num_cpus_per_actor, num_gpus_per_actor, resources_per_actor: what each of them holds.
        init_args, init_kwargs: of every constructor.

    Raises:
        ValueError: no actors, or negative resources. RayActorError: a constructor failed.
    """

    def __init__(
        self,
        actor_cls: type,
        num_actors: int = 1,
        num_cpus_per_actor: float = 1,
        num_gpus_per_actor: float = 0,
        resources_per_actor: Mapping[str, float] | None = None,
        init_args: Sequence[Any] | None = None,
        init_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if num_actors <= 0:
            raise ValueError(
                f"The provided `num_actors` must be greater than 0. Received num_actors={num_actors} instead."
            )
        if num_cpus_per_actor < 0 or num_gpus_per_actor < 0:
            raise ValueError(
                "The number of CPUs and GPUs per actor must not be negative. Received "
                f"num_cpus_per_actor={num_cpus_per_actor} and num_gpus_per_actor={num_gpus_per_actor}."
            )
        self.num_actors = num_actors
        self._args, self._kwargs = tuple(init_args or ()), dict(init_kwargs or {})
        self._actors: list[ActorHandle] = []
        self._metadata: list[ActorMetadata] = []
        self._class: ActorClass[Any] = remote(
            num_cpus=num_cpus_per_actor, num_gpus=num_gpus_per_actor, resources=dict(resources_per_actor or {})
        )(actor_cls)
        self.start()

    def start(self) -> None:
        """Make the actors, and wait until they are up.

        Raises:
            RuntimeError: the group is running.
        """
        if self._actors:
            raise RuntimeError(
                "The actors have already been started. Please call `shutdown` first if you want to restart them."
            )
        self.add_actors(self.num_actors)

    def shutdown(self, patience_s: float = 5) -> None:
        """End all actors.

        Args:
            patience_s: seconds for what they are doing; then, or at once if it is not positive, they are killed.
        """
        end_actors(self._actors, patience_s)
        self._actors, self._metadata = [], []

    def add_actors(self, num_actors: int) -> None:
        """Make some more, and wait until they are up."""
        made = [self._class.remote(*self._args, **self._kwargs) for _ in range(num_actors)]
        self._metadata += get([actor.__ray_call__.remote(_metadata_here) for actor in made])
        self._actors += made

    def remove_actors(self, actor_indexes: Collection[int]) -> None:
        """Leave some out of the group; those that nobody else has a handle of end."""
        keep = [index for index in range(len(self._actors)) if index not in actor_indexes]
        self._actors = [self._actors[index] for index in keep]
        self._metadata = [self._metadata[index] for index in keep]

    @property
    def actors(self) -> list[ActorHandle]:
        """The handles."""
        return list(self._actors)

    @property
    def actor_metadata(self) -> list[ActorMetadata]:
        """Where each of them runs."""
        return list(self._metadata)

    def __getattr__(self, name: str) -> ActorGroupMethod:
        if name.startswith("_"):  # also while the group is being unpickled
            raise AttributeError(name)
        if not self._actors:
            raise RuntimeError("This ActorGroup has been shutdown. Please start it again.")
        return ActorGroupMethod(self, name)

    def __getitem__(self, index: int) -> ActorHandle:
        return self._actors[index]

    def __len__(self) -> int:
        return len(self._actors)


def end_actors(actors: Sequence[ActorHandle], patience: float) -> None:
    """End actors after what they are doing; kill those that have not ended within `patience` seconds."""
    left = list(actors)
    if left and patience > 0:
        ends = {actor.__ray_terminate__.remote(): actor for actor in left}
        _, late = wait(list(ends), num_returns=len(ends), timeout=patience)
        left = [ends[ref] for ref in late]
    for actor in left:
        kill(actor)
