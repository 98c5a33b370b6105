"""How values of a class travel: `register_serializer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcray.wire.views import reduce_with

__all__ = ["deregister_serializer", "register_serializer"]


def register_serializer(cls: type, *, serializer: Callable[[Any], Any], deserializer: Callable[[Any], Any]) -> None:
    """Let values of exactly this class travel as what `serializer` makes of them.

    It holds for what this process sends. What others send back is theirs to register; who receives needs nothing, the
    deserializer travels along.

    Args:
        cls: the class.
        serializer: takes a value, returns something that pickles.
        deserializer: takes that, returns a value again.

    Raises:
        TypeError: `cls` is no class.
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_serializer takes a class, got {cls!r}")
    reduce_with(cls, lambda value: (deserializer, (serializer(value),)))


def deregister_serializer(cls: type) -> None:
    """Let values of this class travel as ever. Nothing happens where none was registered."""
    reduce_with(cls, None)
