"""The memory of stores by where its objects were created."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_UNKNOWN = "(not recorded)"
_ON_DISK = ("spilled", "both")


def object_rows(stores: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per object and node.

    Args:
        stores: as `ObjectInventory.list_stores` gives them.
    """
    return [
        {
            "id": one["id"],
            "node": store["node"],
            "size": one["size"],
            "state": one["state"],
            "copy": one["copy"],
            "owner": one["owner"],
            "refs": one["refs"],
            "borrowers": one["borrowers"],
            "pins": ", ".join(one["pins"]),
            "reads": one["reads"],
            "site": one["site"],
        }
        for store in stores
        for one in store["list"]
    ]


def by_site(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per site of creation, or per owner where sites are not recorded; the largest first."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["site"] or _UNKNOWN, "" if row["site"] else row["owner"])
        one = found.setdefault(
            key, {"site": key[0], "owner": key[1], "bytes": 0, "objects": 0, "pinned": 0, "on_disk": 0, "copies": 0}
        )
        one["bytes"] += row["size"]
        one["objects"] += 1
        one["pinned"] += row["size"] if row["pins"] else 0
        one["on_disk"] += row["size"] if row["state"] in _ON_DISK else 0
        one["copies"] += 1 if row["copy"] else 0
    return sorted(found.values(), key=lambda one: -one["bytes"])
