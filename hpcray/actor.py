"""`ray.actor`: handles, classes, exit_actor."""

from hpcray.api.actor import ActorClass, ActorHandle, ActorMethod, ActorProxy, exit_actor

__all__ = ["ActorClass", "ActorHandle", "ActorMethod", "ActorProxy", "exit_actor"]
