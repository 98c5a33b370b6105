"""Names of the resources of placement groups.

A bundle that is committed adds resources to its node, named as Ray names them: `CPU_group_0_<id>` is the CPU of bundle
0 of a group, `CPU_group_<id>` that of all its bundles on the node. A request in a bundle asks for these instead of CPU,
so everything that schedules requests schedules those of groups too. `bundle` is a resource that every bundle has plenty
of: each request asks for a little of it too, so that one for nothing else also belongs to the group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from hpcray.base.resources import UNIT, Resources

ANY = -1
"""The index that means any bundle of the group."""
SLOTS = "bundle"
ALL_SLOTS = 1000 * UNIT
SLOT = UNIT // 1000
GROUP, CAPTURING = "group", "group:capture"
"""Strategies of requests in a group; of the second, what is started from inside runs in the group too."""

_MARK = "_group_"
_NAME = re.compile(r"(.+)_group_(?:(\d+)_)?([0-9a-f]{26})")


def name_in(group: str, index: int, name: str) -> str:
    """The resource `name` of a bundle. group: id in hex."""
    return f"{name}{_MARK}{group}" if index == ANY else f"{name}{_MARK}{index}_{group}"


def names_in(group: str, index: int, amounts: Mapping[str, int]) -> Resources:
    """A request for plain resources as a request in a bundle."""
    return {name_in(group, index, name): units for name, units in {**amounts, SLOTS: SLOT}.items()}


def bundle_of(request: Iterable[tuple[str, int]]) -> tuple[str, int] | None:
    """Group (id in hex) and bundle index that a request is for, None where it is for no group."""
    for name, _ in request:
        if _MARK in name and (found := _NAME.fullmatch(name)):
            return found[3], ANY if found[2] is None else int(found[2])
    return None


def group_of(request: Iterable[tuple[str, int]]) -> str:
    """The group (id in hex) that a request is for, "" where it is for none."""
    bundle = bundle_of(request)
    return bundle[0] if bundle is not None else ""


def in_bundle(request: Mapping[str, int]) -> Resources:
    """A request in a bundle by the names that resources have inside."""
    return {found[1] if (found := _NAME.fullmatch(name)) else name: units for name, units in request.items()}


def plain(request: Mapping[str, int]) -> Resources:
    """What a request asks for, in a group or not, for people."""
    if not any(_MARK in name for name in request):
        return dict(request)
    inside = in_bundle(request)
    inside.pop(SLOTS, None)
    return inside


def outside(amounts: Mapping[str, int]) -> Resources:
    """Amounts without those of groups."""
    return {name: units for name, units in amounts.items() if _MARK not in name or not _NAME.fullmatch(name)}
