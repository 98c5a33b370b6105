"""The refs inside of values that are nested in each other."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hpcray.runtime.core_worker.object_refs import ObjectRef


def unpack_object_refs(*args: Any) -> tuple[list[ObjectRef[Any]], Callable[[Sequence[Any]], tuple[Any, ...]]]:
    """Find the refs in lists, tuples, sets, dicts and dataclasses, nested to any depth.

    Returns:
        The refs, each once, and a function that takes their values, in this order, and returns `args` with the values
        in the places of the refs.
    """
    places: dict[ObjectRef[Any], int] = {}
    kept = [_unpacked(arg, places) for arg in args]

    def repack(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(_packed(each, values) for each in kept)

    return list(places), repack


class _Place:
    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Made:
    """A container: how it is made of its parts."""

    __slots__ = ("make", "parts")

    def __init__(self, make: Callable[[list[Any]], Any], parts: list[Any]) -> None:
        self.make, self.parts = make, parts


def _unpacked(value: Any, places: dict[ObjectRef[Any], int]) -> Any:
    if isinstance(value, ObjectRef):
        return _Place(places.setdefault(value, len(places)))
    kind: Any = list if isinstance(value, Iterator) else type(value)
    if kind in (list, tuple, set):
        return _Made(kind, [_unpacked(part, places) for part in value])
    if kind in (dict, OrderedDict):
        return _Made(kind, [_Made(tuple, [_unpacked(part, places) for part in item]) for item in value.items()])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        parts = [_unpacked(getattr(value, name), places) for name in names]
        return _Made(lambda parts: kind(**dict(zip(names, parts, strict=True))), parts)
    return value


def _packed(kept: Any, values: Sequence[Any]) -> Any:
    if type(kept) is _Place:
        return values[kept.index]
    if type(kept) is _Made:
        return kept.make([_packed(part, values) for part in kept.parts])
    return kept
