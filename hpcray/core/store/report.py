"""What a node store tells people: why it is full, why an object is lost."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from heapq import nlargest
from typing import Any

from hpcray.base.ids import owner_of, show_proc
from hpcray.core.store.allocator import Allocator
from hpcray.core.store.objects import State, StoredObject
from hpcray.core.store.receives import Receives
from hpcray.core.store.sends import Sends
from hpcray.core.store.space import Space

_TOP_OBJECTS = 5
_TOP_PINS = 3


def full_reason(
    node: int, obj: StoredObject, why: str, blocks: Allocator, held: Iterable[StoredObject], spilling: str
) -> str:
    """Why `obj` got no block on `node`: the request, the store, the largest of the objects that hold it, and what
    became of `spilling`."""
    who = "restoring" if obj.disk is not None else "creating" if obj.creator is not None else "pulling"
    top = sorted(held, key=lambda other: -other.size)[:_TOP_OBJECTS]
    return (
        f"object store of node {node} is full: {who} object {obj.id.hex()} of {show_size(obj.size)} "
        f"({obj.size} bytes) {why}; capacity {show_size(blocks.size)}, used {show_size(blocks.used)}, "
        f"largest free run {show_size(blocks.largest_free)} ({blocks.largest_free} bytes). "
        f"Largest objects that cannot be evicted: {'; '.join(map(describe, top)) or 'none'}. "
        f"{spilling} hint: drop references and arrays that are no longer needed, or start with a "
        "larger object store (HPCRAY_OBJECT_STORE_MEMORY, in bytes)"
    )


def absent_reason(node: int, ident: bytes, nodes: Collection[int], dead: Collection[int]) -> str:
    """Why an object that is not on `node` cannot be had from the `nodes` that the opener named."""
    if not nodes:
        return f"object {ident.hex()} is not on node {node}"
    known = ", ".join(f"{other} (dead)" if other in dead else str(other) for other in nodes)
    return f"object {ident.hex()} is not on node {node}, and no other living node has it (told: {known or 'none'})"


def describe(obj: StoredObject) -> str:
    """One line: size, id, owner, and what keeps it."""
    if obj.pins:
        keeps = "pinned by " + ", ".join(show_proc(proc) for proc in sorted(obj.pins)[:_TOP_PINS])
        if len(obj.pins) > _TOP_PINS:
            keeps += f" and {len(obj.pins) - _TOP_PINS} more"
    elif obj.keepers and obj.state is State.SEALED:
        keeps = "a copy kept for " + ", ".join(map(show_proc, sorted(obj.keepers)))
    elif obj.reads:
        keeps = f"being read by {obj.reads} transfer(s)"
    elif obj.state is State.PULLING and obj.pull is not None:
        keeps = f"being received from node {obj.pull.node}"
    else:
        keeps = "referenced by its owner"
    state = "" if obj.state is State.SEALED else f", {obj.state.value}"
    return f"{show_size(obj.size)} {obj.id.hex()} (owner {show_proc(owner_of(obj.id))}{state}, {keeps})"


def show_space(space: Space) -> dict[str, int]:
    """Numbers of the arena, in bytes; `evicted` counts objects."""
    blocks = space.blocks
    return {
        "capacity": blocks.size,
        "used": blocks.used,
        "largest_free": blocks.largest_free,
        "high_water": blocks.high_water,
        "evictable": space.evictable_bytes,
        "evicted": space.evicted,
    }


def show_objects(objects: Collection[StoredObject]) -> dict[str, int]:
    """How many objects there are, are pinned, and are in which state."""
    numbers = dict.fromkeys((state.value for state in State), 0)
    for obj in objects:
        numbers[obj.state.value] += 1
    return {"objects": len(objects), "pinned": sum(1 for obj in objects if obj.pins), **numbers}


def show_transfers(receives: Receives, sends: Sends) -> dict[str, int]:
    """How many transfers are under way, how many ended well, how many askers were sent to other readers."""
    return {
        "receiving": len(receives),
        "pulled": receives.ok,
        "sending": len(sends),
        "sent": sends.ok,
        "sent_on": sends.sent_on,
    }


def list_objects(objects: Iterable[StoredObject], limit: int) -> list[dict[str, Any]]:
    """The largest objects, at most so many: id, bytes, where ("memory", "spilled", "both", or what is being done),
    whether it is a copy of another node's, the processes that have it pinned, and the transfers that read it."""
    return [
        {
            "id": obj.id,
            "size": obj.size,
            "state": _where(obj),
            "copy": obj.creator is None,
            "pins": sorted(obj.pins),
            "reads": obj.reads,
        }
        for obj in nlargest(limit, objects, key=lambda obj: (obj.size, obj.id))
    ]


def _where(obj: StoredObject) -> str:
    if obj.state is State.SEALED:
        return "memory" if obj.disk is None else "both"
    return str(obj.state.value)


def show_size(size: int) -> str:
    """`1.5 GB`, `20.0 kB`, `17 B`: for people."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"
