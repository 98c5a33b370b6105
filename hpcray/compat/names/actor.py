"""`ray.actor`: what others use of it beside hpcray's."""

from __future__ import annotations

from typing import Any

from hpcray.api.actor import ActorClass, ActorClassInheritanceException, ActorHandle, ActorMethod, exit_actor

__all__ = ["ActorClass", "ActorClassInheritanceException", "ActorHandle", "ActorMethod", "exit_actor"]


def _modify_class(cls: type) -> type:
    """The class that an actor class is made of. In Ray it gets methods of Ray's own; here nothing is added.

    A subclass with the same name, so that what is set on it does not reach the user's class.

    Raises:
        TypeError: it is an actor class already, or no class.
    """
    if isinstance(cls, ActorClass):
        raise TypeError("an actor class is given where a plain class is wanted")
    if not isinstance(cls, type):
        raise TypeError(f"a class is wanted, not {type(cls).__name__}")
    if hasattr(cls, "__ray_actor_class__"):
        return cls
    body: dict[str, Any] = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "__qualname__": cls.__qualname__,
        "__ray_actor_class__": cls,
    }
    return type(cls)(cls.__name__, (cls,), body)
