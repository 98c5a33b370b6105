"""`ray.actor._modify_class`."""

from __future__ import annotations

from typing import Any

from hpcray.api.actor import ActorClass


def _modify_class(cls: type) -> type:
    """Make a subclass of the same name, so that attributes set on it do not reach the user's class.

    Ray adds methods of its own to the subclass; hpcray adds none.

    Raises:
        TypeError: the argument is an actor class, or no class.
    """
    if isinstance(cls, ActorClass):
        raise TypeError("a plain class is required, not an actor class")
    if not isinstance(cls, type):
        raise TypeError(f"a class is required, not {type(cls).__name__}")
    if hasattr(cls, "__ray_actor_class__"):
        return cls
    body: dict[str, Any] = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "__qualname__": cls.__qualname__,
        "__ray_actor_class__": cls,
    }
    return type(cls)(cls.__name__, (cls,), body)
