"""Placement groups: resources reserved together in bundles. Placement of tasks and actors in a bundle or on a node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hpcray.api.options import exact_units, warn_of_object_store_memory
from hpcray.api.scheduling_strategies import LaunchHook, PlacementGroupSchedulingStrategy, launched, strategy_in_force
from hpcray.api.session import require_session
from hpcray.common.exceptions import RaySystemError
from hpcray.common.labels import (
    ACCELERATOR,
    IN,
    NODE_ID,
    SOFT,
    conditions,
    selector_problem,
    to_strategy,
    with_conditions,
)
from hpcray.common.resources import ANY, CAPTURING, GROUP, fits, names_in, to_amounts
from hpcray.core.gcs.placement_group_scheduler import PACK, SPREAD, STRICT_PACK, STRICT_SPREAD
from hpcray.protocol import messages as m
from hpcray.protocol.messages import Shape
from hpcray.runtime.core_worker.core_worker import CoreWorker, current
from hpcray.runtime.core_worker.object_refs import ObjectRef

STRATEGIES = (PACK, SPREAD, STRICT_PACK, STRICT_SPREAD)
_GPU_DOMAIN = "ray.io/gpu-domain"
_WITH_DOMAINS = {"GB200", "GB300"}
"""Accelerators whose groups are on nodes of one GPU domain: their fast links end there."""
_EXAMPLE = 'For example: `[{"CPU": 1.0}, {"GPU": 1.0}]`.'


class PlacementGroupID(bytes):
    """Id of a placement group. The empty id stands for no group."""

    __slots__ = ()

    def binary(self) -> bytes:
        """Return the id as bytes."""
        return bytes(self)

    def is_nil(self) -> bool:
        """Return True for the empty id."""
        return not self

    def __repr__(self) -> str:
        return f"PlacementGroupID({self.hex()})"

    def __reduce__(self) -> tuple[Any, ...]:
        return PlacementGroupID, (bytes(self),)


class PlacementGroup:
    """Handle of a placement group. It can be passed to tasks and actors. The group ends with `remove_placement_group`,
    or with its creator.

    Attributes:
        id: id of the group.
        bundle_cache: resources of the bundles; None until they are known here.
    """

    def __init__(self, id: PlacementGroupID, bundle_cache: list[dict[str, float]] | None = None) -> None:
        self.id = id
        self.bundle_cache = bundle_cache

    @staticmethod
    def empty() -> PlacementGroup:
        """Return the handle that stands for no group."""
        return PlacementGroup(PlacementGroupID(b""), [])

    @property
    def is_empty(self) -> bool:
        """True for the handle that stands for no group."""
        return self.id.is_nil()

    @property
    def bundle_specs(self) -> list[dict[str, float]]:
        """Resources of the bundles, by index."""
        if self.bundle_cache is None:
            self.bundle_cache = require_session().gcs.call("placement_group", bytes(self.id), "", "")["bundles"]
        return self.bundle_cache

    @property
    def bundle_count(self) -> int:
        """Number of bundles."""
        return len(self.bundle_specs)

    def ready(self) -> ObjectRef[PlacementGroup]:
        """Return a ref that is ready when all bundles are reserved. Its value is this group.

        `get` of the ref raises TaskPlacementGroupRemoved where the group is removed first.
        """
        self._check()
        return require_session().placement_groups.ready(bytes(self.id), self)

    def wait(self, timeout_seconds: float = 30) -> bool:
        """Wait until all bundles are reserved.

        Args:
            timeout_seconds: longest time to wait.

        Returns:
            True if all bundles are reserved.

        Raises:
            ValueError: the group was removed.
        """
        self._check()
        return require_session().placement_groups.wait(bytes(self.id), float(timeout_seconds))

    def _check(self) -> None:
        if self.is_empty:
            raise ValueError("this placement group is none (PlacementGroup.empty()); hint: make one: placement_group()")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlacementGroup) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"PlacementGroup({self.id.hex()})"

    def __reduce__(self) -> tuple[Any, ...]:
        return PlacementGroup, (self.id, self.bundle_cache)


def placement_group(
    bundles: list[dict[str, float]],
    strategy: str | None = None,
    name: str = "",
    lifetime: str | None = None,
    _soft_target_node_id: str | None = None,
    bundle_label_selector: list[dict[str, str]] | None = None,
    topology_strategy: dict[str, str] | None = None,
) -> PlacementGroup:
    """Reserve bundles of resources, all of them or none. Returns at once; wait with `ready()` or `wait()`.

    Args:
        bundles: resources of each bundle, as `{"CPU": 2, "GPU": 0.5}`. A bundle is on one node.
        strategy: "PACK", the default: on as few nodes as possible; "SPREAD": on as many as possible; "STRICT_PACK": on
            one node; "STRICT_SPREAD": each on a node of its own.
        name: name for `get_placement_group`, in the namespace of the job.
        lifetime: None: the group ends with the driver or actor that created it, or with the job where a task created
            it; "detached": with the job.
        _soft_target_node_id: id of the node that is taken where it has room, for "STRICT_PACK".
        bundle_label_selector: for each bundle conditions on the labels of its node, as in `label_selector`.
        topology_strategy: instead of `strategy`, by label: {"ray.io/node-id": a strategy, another label:
            "STRICT_PACK"}. All nodes of the group then have the same value of the other label.

    Returns:
        The handle of the group.

    Raises:
        ValueError, TypeError: an argument is not valid, or the name is taken. Nothing is reserved.
    """
    units, strategy, selectors, same = check_request(
        bundles, strategy, lifetime, _soft_target_node_id, bundle_label_selector, topology_strategy
    )
    if name is not None and not isinstance(name, str):
        raise TypeError(f"Placement group `name` argument must be a string, got {type(name)}.")
    process = require_session()
    with process.engine.lock:
        ident = PlacementGroupID(process.next_task_id())
    namespace = process.place.namespace
    spec = m.GroupSpec(
        bytes(ident), units, strategy, name or "", namespace, _owner(process, lifetime), selectors,
        _soft_target_node_id or "", same,
    )  # fmt: skip
    process.placement_groups.create(spec)
    return PlacementGroup(ident, [{name: float(amount) for name, amount in bundle.items()} for bundle in bundles])


def check_request(
    bundles: Any, strategy: Any, lifetime: Any, soft_target_node_id: Any, bundle_label_selector: Any, topology: Any
) -> tuple[list[dict[str, int]], str, list[str], str]:
    """Check the arguments of `placement_group()`.

    Returns:
        (units of each bundle, strategy for nodes, conditions on the node of each bundle, label that all nodes share).

    Raises:
        ValueError: an argument is not valid.
    """
    strategy, same = _checked_strategy(strategy, topology)
    if soft_target_node_id and strategy != STRICT_PACK:
        raise ValueError(f"_soft_target_node_id currently only works with STRICT_PACK but got {strategy}")
    units = checked_bundles(bundles)
    if any("object_store_memory" in bundle for bundle in units):
        warn_of_object_store_memory("bundles")
    selectors = bundle_selectors(bundle_label_selector, len(units))
    if any(map(_needs_domain, bundle_label_selector or ())):
        same = same or _GPU_DOMAIN
    if lifetime not in (None, "detached"):
        raise ValueError(f"Placement group `lifetime` argument must be either `None` or 'detached'. Got {lifetime}.")
    return units, strategy, selectors, same


def remove_placement_group(placement_group: PlacementGroup) -> None:
    """Remove a placement group, and kill the tasks and actors that run in it. Returns at once."""
    if not placement_group.is_empty:
        require_session().placement_groups.remove(bytes(placement_group.id))


def get_placement_group(placement_group_name: str) -> PlacementGroup:
    """Return the placement group with this name in the namespace of the job.

    Raises:
        ValueError: no group has this name.
    """
    if not placement_group_name:
        raise ValueError("Please supply a non-empty value to get_placement_group")
    process = require_session()
    try:
        row = process.gcs.call("placement_group", b"", placement_group_name, process.place.namespace)
    except ValueError:
        raise ValueError(f"Failed to look up placement group with name: {placement_group_name}") from None
    return PlacementGroup(PlacementGroupID(row["group"]), row["bundles"])


def get_current_placement_group() -> PlacementGroup | None:
    """Return the placement group of the current task or actor; None for none, and in a driver."""
    process = require_session()
    group = process.placement_groups.running_in
    return PlacementGroup(PlacementGroupID(bytes.fromhex(group))) if group else None


def placement_group_table(placement_group: PlacementGroup | PlacementGroupID | None = None) -> dict[str, Any]:
    """Return the row of one placement group, or the rows of all groups by id in hex.

    Only the last removed groups have rows; the row of an unknown group is {}.
    """
    process = require_session()
    if placement_group is None:
        return {row["group"].hex(): _table_row(row) for row in process.gcs.call("placement_groups")}
    ident = placement_group.id if isinstance(placement_group, PlacementGroup) else placement_group
    try:
        return _table_row(process.gcs.call("placement_group", bytes(ident), "", ""))
    except ValueError:
        return {}


def _table_row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "placement_group_id": row["group"].hex(),
        "name": row["name"],
        "bundles": dict(enumerate(row["bundles"])),
        "bundles_to_node_id": dict(enumerate(row["node_ids"])),
        "strategy": row["strategy"],
        "state": row["state"],
        "stats": {"scheduling_attempt": row["attempts"], "scheduling_state": row["scheduling_state"]},
    }


def _owner(process: CoreWorker, lifetime: str | None) -> bytes:
    """Return the process whose end removes the group; b"" for a group that lasts as long as the job, as of tasks."""
    in_task = current.worker is not None and current.worker.actor is None
    return b"" if lifetime == "detached" or in_task else process.me


def bundle_selectors(given: Any, bundles: int | None) -> list[str]:
    """Return the conditions on the node of each bundle.

    Args:
        bundles: their number; None: it is not checked.

    Raises:
        ValueError: it is no list of label selectors.
    """
    if not given:
        return []
    if not isinstance(given, list):
        raise ValueError(f"Placement group bundle_label_selector must be a list, got {type(given)}.")
    if bundles is not None and len(given) != bundles:
        raise ValueError(
            f"Invalid bundle label selector {given}. The length of `bundle_label_selector` should equal the length of "
            "`bundles`."
        )
    accelerator = next((one[ACCELERATOR] for one in given if isinstance(one, dict) and _needs_domain(one)), None)
    for selector in given:
        if not isinstance(selector, dict) or not all(isinstance(text, str) for row in selector.items() for text in row):
            raise ValueError(
                "Bundle label selector must be a list of string dictionary label selectors. For example: "
                '`[{"ray.io/market-type": "spot"}, {"ray.io/accelerator-type": "A100"}]`.'
            )
        problem = selector_problem(selector)
        if problem:
            raise ValueError(
                f"Invalid label selector provided in bundle_label_selector list. Detailed error: '{problem}'"
            )
        if accelerator and selector.get(ACCELERATOR) != accelerator:
            raise ValueError(
                f"Invalid bundle label selector {selector}. GPU-domain scheduling requires all bundles to have "
                f"'{ACCELERATOR}: {accelerator}' in their label selector."
            )
    return [to_strategy([conditions(selector)]) if selector else "" for selector in given]


def _needs_domain(selector: Any) -> bool:
    return isinstance(selector, dict) and selector.get(ACCELERATOR) in _WITH_DOMAINS


def _checked_strategy(strategy: str | None, topology: Any) -> tuple[str, str]:
    """Return the strategy for nodes, and the label of which all nodes have the same value ("" for none)."""
    supported = f"Supported strategies are: {set(STRATEGIES)}."
    if topology is None:
        if strategy is not None and strategy not in STRATEGIES:
            raise ValueError(f"Invalid placement group strategy {strategy}. {supported}")
        return strategy or PACK, ""
    if strategy is not None:
        raise ValueError(
            "`strategy` and `topology_strategy` cannot both be specified. Pass node-level packing via "
            f"`topology_strategy['{NODE_ID}']`."
        )
    if not isinstance(topology, dict):
        raise ValueError(f"`topology_strategy` must be a dict, got {type(topology).__name__}.")
    for label, value in topology.items():
        if not isinstance(label, str) or not label:
            raise ValueError(f"`topology_strategy` keys must be non-empty strings, got {label!r}.")
        if value not in STRATEGIES:
            raise ValueError(f"Invalid topology strategy {value!r} for label {label!r}. {supported}")
        if label != NODE_ID and value != STRICT_PACK:
            raise ValueError(
                f"Topology strategy {value!r} for label {label!r} is not supported yet; only 'STRICT_PACK' is "
                f"supported for topology labels other than `{NODE_ID}` for now."
            )
    others = [label for label in topology if label != NODE_ID]
    if len(others) > 1:
        raise ValueError(
            f"`topology_strategy` currently supports at most one topology label other than `{NODE_ID}`. Got {others}."
        )
    return topology.get(NODE_ID, PACK), others[0] if others else ""


def checked_bundles(bundles: Any) -> list[dict[str, int]]:
    """Return the units of each bundle. Raises ValueError for what is no list of bundles."""
    if not isinstance(bundles, list):
        raise ValueError(f"Placement group bundles must be a list, got {type(bundles)}.")
    if not bundles:
        raise ValueError(
            f"Bundles must be a non-empty list of resource dictionaries. {_EXAMPLE} Got empty list instead."
        )
    checked = [_checked_bundle(bundle) for bundle in bundles]
    if not all(checked):
        raise ValueError(
            f"Bundles cannot be an empty dictionary or resources with only 0 values. Bundles: {bundles}; "
            f"hint: for example {_EXAMPLE}"
        )
    return checked


_RESERVED = "bundle"


def _checked_bundle(bundle: Any) -> dict[str, int]:
    if (
        not isinstance(bundle, dict)
        or not all(isinstance(name, str) and name for name in bundle)
        or not all(isinstance(amount, (int, float)) for amount in bundle.values())
    ):
        raise ValueError(f"Bundles must be a non-empty list of resource dictionaries. {_EXAMPLE}")
    if _RESERVED in bundle:
        raise RaySystemError(
            f"{_RESERVED} is a system reserved resource, which is not allowed to be used in placement group."
        )
    gpus = bundle.get("GPU", 0)
    if gpus > 1 and gpus != int(gpus):
        raise ValueError(f"GPU resource quantities >1 must be whole numbers. The specified quantity {gpus} is invalid.")
    return exact_units(bundle)


def check_index(group: PlacementGroup, index: int) -> None:
    """Raise ValueError unless the group has a bundle with this index, or the index is -1."""
    if group.is_empty:
        if index != ANY:
            raise ValueError("If placement group is not set, the value of bundle index must be -1.")
    elif index >= group.bundle_count or index < ANY:
        raise ValueError(
            f"placement group bundle index {index} is invalid. Valid placement group indexes: 0-{group.bundle_count}"
        )


_NODE_ID_PREFIX = "node_id:"


def with_placement(
    process: CoreWorker, given: Mapping[str, Any], hold: Shape, place: Shape, what: Any, hooks: list[LaunchHook]
) -> tuple[Shape, Shape]:
    """Resolve node ids and placement groups in the shapes of a task or actor.

    Args:
        process: the process that submits the task or actor.
        given: options of the task or actor.
        hold: resources that it holds while it runs.
        place: resources that its node needs when it starts; for tasks the same object as `hold`.
        what: the function of the task, or the class of the actor.
        hooks: called with what is launched.

    Returns:
        (hold, place) with node indices and the resource names of bundles.

    Raises:
        ValueError: the node or the bundle does not exist, or the request fits into no bundle.
    """
    found = _group(process, given)
    if hooks:
        launched(hooks, what, to_amounts(dict(hold.resources)), strategy_in_force(given, found))
    hold, place = (
        resolve_node_affinity(process, hold),
        (resolve_node_affinity(process, place) if place is not hold else hold),
    )
    if found is None:
        return hold, (hold if place is hold else place)
    group, index, captures = found
    _check_fits(group, hold, place, getattr(what, "__qualname__", "the task"))
    strategy = CAPTURING if captures else GROUP
    return _inside(group, index, strategy, hold), _inside(group, index, strategy, place)


def _inside(group: PlacementGroup, index: int, strategy: str, shape: Shape) -> Shape:
    names = names_in(group.id.hex(), index, dict(shape.resources))
    strategy = with_conditions(strategy, shape.strategy)
    return msgspec.structs.replace(shape, resources=tuple(sorted(names.items())), strategy=strategy)


def _group(process: CoreWorker, given: Mapping[str, Any]) -> tuple[PlacementGroup, int, bool] | None:
    """Return (group, bundle index, True if child tasks are captured); None for no group."""
    strategy = given.get("scheduling_strategy")
    if isinstance(strategy, PlacementGroupSchedulingStrategy):
        group = strategy.placement_group
        index, captures = strategy.placement_group_bundle_index, strategy.placement_group_capture_child_tasks
    elif strategy is None:
        group = given.get("placement_group", "default")
        index = given.get("placement_group_bundle_index", ANY)
        captures = given.get("placement_group_capture_child_tasks")
    else:
        return None
    if captures is None:
        captures = process.placement_groups.captures
    if isinstance(group, str) and group == "default":
        group = get_current_placement_group() if captures else None
    group = group or PlacementGroup.empty()
    if not isinstance(group, PlacementGroup):
        raise ValueError(f"a placement group must be a PlacementGroup, 'default' or None, but is {group!r}")
    check_index(group, index)
    return None if group.is_empty else (group, index, bool(captures))


def _check_fits(group: PlacementGroup, hold: Shape, place: Shape, what: str) -> None:
    bundles = group.bundle_specs
    capacities = [exact_units(bundle) for bundle in bundles]
    for shape in (hold, place):
        if any(fits(dict(shape.resources), bundle) for bundle in capacities):
            continue
        amounts = to_amounts(dict(shape.resources))
        needs = {name: int(amount) if amount.is_integer() else amount for name, amount in amounts.items()}
        if shape is hold:
            raise ValueError(
                f"Cannot schedule {what} with the placement group because the resource request {needs} cannot fit into "
                f"any bundles for the placement group, {bundles}."
            )
        raise ValueError(
            f"Cannot schedule {what} with the placement group because the actor requires {needs.get('CPU', 0)} CPU for "
            f"creation, but it cannot fit into any bundles for the placement group, {bundles}. Consider creating a "
            "placement group with CPU resources."
        )


def resolve_node_affinity(process: CoreWorker, shape: Shape) -> Shape:
    """Replace the node id of a node affinity by the node's index, and add the environment variables of the parent.

    Where the cluster has no such node, the head finds that out of a hard affinity.
    """
    strategy = shape.strategy
    worker = current.worker
    if worker is not None and worker.lease.env:
        env = {**worker.lease.env, **dict(shape.env)}
        shape = msgspec.structs.replace(shape, env=tuple(sorted(env.items())))
    if not strategy.startswith(_NODE_ID_PREFIX):
        return shape
    node_id, _, manner = strategy[len(_NODE_ID_PREFIX) :].partition(":")
    index = process.gcs.node_index(node_id)
    if index is not None:
        strategy = f"node:{index}" + f":{manner}" * bool(manner)
    else:
        strategy = "" if manner == SOFT else to_strategy([((NODE_ID, IN, (node_id,)),)])
    return msgspec.structs.replace(shape, strategy=strategy)
