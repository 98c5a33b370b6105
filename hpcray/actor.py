"""`ray.actor`: handles, classes, exit_actor."""

from hpcray.api.actor import ActorClass, ActorHandle, ActorMethod, exit_actor

__all__ = ["ActorClass", "ActorHandle", "ActorMethod", "exit_actor"]
