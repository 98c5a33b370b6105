"""Custom serializers of classes, and the search for the parts of a value that do not pickle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcray.protocol.out_of_band import reduce_with
from hpcray.protocol.serializability import FailureTuple, inspect_serializability

__all__ = ["FailureTuple", "deregister_serializer", "inspect_serializability", "register_serializer"]


def register_serializer(cls: type, *, serializer: Callable[[Any], Any], deserializer: Callable[[Any], Any]) -> None:
    """Set the serializer for values of exactly this class, without its subclasses.

    The registration applies to values that this process sends. A receiver needs none: the deserializer is sent with the
    value.

    Args:
        cls: the class.
        serializer: converts a value to an object that pickles.
        deserializer: converts that object to a value.

    Raises:
        TypeError: `cls` is no class.
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_serializer takes a class, got {cls!r}")
    reduce_with(cls, lambda value: (deserializer, (serializer(value),)))


def deregister_serializer(cls: type) -> None:
    """Remove the serializer of a class, if there is one."""
    reduce_with(cls, None)
