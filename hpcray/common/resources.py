"""Resource amounts as exact integers.

One unit is 1/10,000: RL stacks ask for `{"accelerator": 1e-4}`, which milli-units cannot hold. A request is
`Resources`, a plain dict from name to units; absent means zero.

Placement groups: a committed bundle adds resources to its node, with Ray's names: `CPU_group_0_<id>` is the CPU of
bundle 0 of a group, `CPU_group_<id>` the CPU of all of its bundles on the node. A request in a bundle requests these
instead of CPU, so the schedulers need no other rule for groups. Every bundle also has the resource `bundle`, of which
each request needs a little, so that a request for nothing else also belongs to the group.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

UNIT = 10_000
REPORT_AFTER = 10.0
"""Seconds that a request waits before its holder gets a report of what it waits for."""
Resources = dict[str, int]
RUNTIME_ENV = "HPCRAY_RUNTIME_ENV"
"""Variable of the fork server's request: the fields of a worker's runtime environment, as JSON."""
JOB_FIELD = "job"
"""Field of a worker's runtime_env: the job of a driver that is not the cluster's first."""
OUTLIVES_JOB = "outlives_job"
"""Field of the runtime_env of a detached actor, and of all that it starts: these do not end with the job."""
ASSIGNED_GPUS = "HPCRAY_ASSIGNED_GPUS"
"""Variable of the environment of a GPU worker: the ids of its devices, separated by commas. The fork server converts it
to the vendor's variable. A worker keeps its devices for life, since libraries detect devices once; so the worker pool
treats different devices as different environments."""

ASSIGNED_ACCELERATORS = "HPCRAY_ASSIGNED_ACCELERATORS"
"""The same for accelerators that are no GPUs, of all kinds: `TPU=0,1;NPU=3`."""
ACCELERATOR_TYPE = "accelerator_type:"
"""Before the name of a type: the resource of which a node with such devices has 1."""
ACCELERATOR_TYPE_SHARE = 0.001
"""Amount of it that a request for the type takes: enough to be placed by, and little enough for many."""
IMPLICIT = "node:__internal_implicit_resource_"
"""Before a name that Ray Serve makes up: a resource of which every node has 1 as soon as an actor asks for some."""
ACCELERATORS = ("GPU", "TPU", "NPU", "HPU", "neuron_cores", "RBLN", "FURIOSA", "MBLT", "TTNPU")
"""Names of the resources whose units are devices with ids."""


def runtime_env_fields(env: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return the fields of the runtime environment of a worker that was forked with these variables."""
    fields: dict[str, Any] = json.loads(dict(env).get(RUNTIME_ENV) or "{}")
    return fields


def to_units(amounts: Mapping[str, float]) -> Resources:
    """Convert user amounts (CPU: 0.5) into exact units; zero amounts are dropped.

    Args:
        amounts: resource name to amount, non-negative, at most four decimals.

    Raises:
        ValueError: an amount is negative, not finite, or finer than 1/10,000.
    """
    out: Resources = {}
    for name, amount in amounts.items():
        try:
            scaled = float(amount) * UNIT
            units = round(scaled)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"resource {name!r}: {amount!r} is not a finite number") from None
        if units < 0:
            raise ValueError(f"resource {name!r}: {amount!r} is negative")
        if abs(scaled - units) > 1e-6 * max(1.0, scaled):
            raise ValueError(f"resource {name!r}: {amount!r} is finer than 1/{UNIT}; hint: round it to four decimals")
        if units:
            out[name] = units
    return out


def implicit(request: Iterable[str]) -> list[str]:
    """Return the names in a request of which every node has 1 without having been given it."""
    return [name for name in request if name.startswith(IMPLICIT)]


def to_amounts(units: Mapping[str, int]) -> dict[str, float]:
    """Convert units back into user amounts."""
    return {name: value / UNIT for name, value in units.items()}


def fits(request: Mapping[str, int], available: Mapping[str, int]) -> bool:
    """Return True if `available` covers `request`."""
    return all(available.get(name, 0) >= units for name, units in request.items())


def add(into: Resources, amount: Mapping[str, int]) -> None:
    """Add `amount` to `into`, in place."""
    for name, units in amount.items():
        into[name] = into.get(name, 0) + units


def subtract(into: Resources, amount: Mapping[str, int]) -> None:
    """Subtract `amount` from `into`, in place.

    Amounts may become negative: a worker that resumes after a blocking `get` takes its CPU back at once, even if it
    was leased to another worker meanwhile.
    """
    for name, units in amount.items():
        into[name] = into.get(name, 0) - units


ANY = -1
"""Bundle index for any bundle of the group."""
SLOTS = "bundle"
ALL_SLOTS = 1000 * UNIT
SLOT = UNIT // 1000
LATE_BOUND_NODES = 8
"""Nodes at which a request for any bundle of a placement group queues at once, at most; on more, the GCS serves it."""
GROUP, CAPTURING = "group", "group:capture"
"""Strategies of requests in a group. With the second, child tasks run in the group too."""

_MARK = "_group_"
_NAME = re.compile(r"(.+)_group_(?:(\d+)_)?([0-9a-f]{26})")


def name_in(group: str, index: int, name: str) -> str:
    """Return the name of a bundle's resource. group: id in hex."""
    return f"{name}{_MARK}{group}" if index == ANY else f"{name}{_MARK}{index}_{group}"


def names_in(group: str, index: int, amounts: Mapping[str, int]) -> Resources:
    """Convert a request for plain resources to a request in a bundle."""
    return {name_in(group, index, name): units for name, units in {**amounts, SLOTS: SLOT}.items()}


def bundle_of(request: Iterable[tuple[str, int]]) -> tuple[str, int] | None:
    """Return (group id in hex, bundle index) of a request; None for a request without a group."""
    for name, _ in request:
        if _MARK in name and (found := _NAME.fullmatch(name)):
            return found[3], ANY if found[2] is None else int(found[2])
    return None


def group_of(request: Iterable[tuple[str, int]]) -> str:
    """Return the group (id in hex) of a request; "" for a request without a group."""
    bundle = bundle_of(request)
    return bundle[0] if bundle is not None else ""


def in_bundle(request: Mapping[str, int]) -> Resources:
    """Convert a request in a bundle to plain resource names."""
    return {found[1] if (found := _NAME.fullmatch(name)) else name: units for name, units in request.items()}


def plain(request: Mapping[str, int]) -> Resources:
    """Return a request by plain resource names, without the group's own resource; for display."""
    if not any(_MARK in name for name in request):
        return dict(request)
    inside = in_bundle(request)
    inside.pop(SLOTS, None)
    return inside


def outside(amounts: Mapping[str, int]) -> Resources:
    """Return the amounts without the resources of placement groups."""
    return {name: units for name, units in amounts.items() if _MARK not in name or not _NAME.fullmatch(name)}


def free_of(about: Resources, available: Resources, total: Resources) -> str:
    """`{CPU: 1} of {CPU: 4}`, for the resources in `about`."""
    return " of ".join(show({name: amounts.get(name, 0) for name in about}) for amounts in (available, total))


def waiting_text(requester: str, request: Resources, there: str) -> str:
    """The report for a request that waits for others to end.

    Args:
        requester: the grammatical subject, "a task" or "actor X".
        there: what is free, as `free_of` shows it.
    """
    if bundle_of(request.items()) is not None:
        requester += " in a placement group"
    hint = "hint: wait, hold less (actors keep theirs for life), or start more nodes; `hpcray status` shows more"
    if "GPU" in request:
        hint += ". A GPU that is shared by fractions serves no whole request"
    return (
        f"{requester} asks for {show(request)} and has waited for {REPORT_AFTER:g} s, while others hold what it needs. "
        f"Free now: {there}. {hint}"
    )


ADDRESS_PREFIX = "node:"
"""Begins the resource that each node has for its address."""


def show(request: Resources, addresses: bool = True) -> str:
    """`{CPU: 4, GPU: 0.5}`, with bytes of memory in GiB.

    Args:
        request: in units.
        addresses: show the resources for addresses of nodes too.
    """
    parts = []
    for name, amount in sorted(to_amounts(plain(request)).items()):
        if name in ("memory", "object_store_memory"):
            parts.append(f"{name}: {amount / 2**30:.1f} GiB")
        elif addresses or not name.startswith(ADDRESS_PREFIX):
            parts.append(f"{name}: {amount:g}")
    return "{" + ", ".join(parts) + "}"
