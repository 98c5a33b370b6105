"""Placement groups: resources reserved together, in bundles, on one node or on many."""

from __future__ import annotations

from typing import Any

from hpcray.api.options import exact_units
from hpcray.api.session import ensure
from hpcray.base.bundle_names import ANY
from hpcray.base.labels import conditions, selector_problem, to_strategy
from hpcray.core.scheduler.planning import PACK, SPREAD, STRICT_PACK, STRICT_SPREAD
from hpcray.runtime.process import Process
from hpcray.runtime.refs import ObjectRef, current
from hpcray.wire import messages as m

STRATEGIES = (PACK, SPREAD, STRICT_PACK, STRICT_SPREAD)
_EXAMPLE = 'For example: `[{"CPU": 1.0}, {"GPU": 1.0}]`.'


class PlacementGroupID(bytes):
    """Id of a placement group. Empty for the group that is none."""

    __slots__ = ()

    def binary(self) -> bytes:
        """The id's bytes."""
        return bytes(self)

    def is_nil(self) -> bool:
        """Whether it names no group."""
        return not self

    def __repr__(self) -> str:
        return f"PlacementGroupID({self.hex()})"

    def __reduce__(self) -> tuple[Any, ...]:
        return PlacementGroupID, (bytes(self),)


class PlacementGroup:
    """A handle to a placement group. It may be passed on; the group lives until it is removed, or its creator ends.

    Attributes:
        id: of the group.
        bundle_cache: what the bundles hold.
    """

    def __init__(self, id: PlacementGroupID, bundle_cache: list[dict[str, float]] | None = None) -> None:
        self.id = id
        self.bundle_cache = bundle_cache

    @staticmethod
    def empty() -> PlacementGroup:
        """The group that is none: what is scheduled in it is in no group."""
        return PlacementGroup(PlacementGroupID(b""), [])

    @property
    def is_empty(self) -> bool:
        """Whether it is none."""
        return self.id.is_nil()

    @property
    def bundle_specs(self) -> list[dict[str, float]]:
        """What the bundles hold, by index."""
        if self.bundle_cache is None:
            self.bundle_cache = ensure().gcs.call("placement_group", bytes(self.id), "", "")["bundles"]
        return self.bundle_cache

    @property
    def bundle_count(self) -> int:
        """How many bundles it has."""
        return len(self.bundle_specs)

    def ready(self) -> ObjectRef[PlacementGroup]:
        """A ref that is there when all bundles are reserved; its value is this group.

        `get` of it raises TaskPlacementGroupRemoved when the group is removed before.
        """
        self._check()
        return ensure().groups.ready(bytes(self.id), self)

    def wait(self, timeout_seconds: float = 30) -> bool:
        """Whether all bundles are reserved, after this time at most.

        Raises:
            ValueError: the group is removed.
        """
        self._check()
        return ensure().groups.wait(bytes(self.id), float(timeout_seconds))

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
    strategy: str = "PACK",
    name: str = "",
    lifetime: str | None = None,
    _soft_target_node_id: str | None = None,
    bundle_label_selector: list[dict[str, str]] | None = None,
    topology_strategy: Any = None,
) -> PlacementGroup:
    """Reserve bundles of resources: all of them or none. Returns at once; `ready()` and `wait()` tell when it is done.

    Args:
        bundles: what each holds, as `{"CPU": 2, "GPU": 0.5}`. A bundle is on one node.
        strategy: "PACK": on as few nodes as possible; "SPREAD": on as many; "STRICT_PACK": on one; "STRICT_SPREAD": on
            a node each.
        name: for `get_placement_group`, in the namespace of the job.
        bundle_label_selector: for each bundle conditions on the labels of its node, as `label_selector` has them.
        lifetime: None: the group ends with its creator (driver or actor; that of a task with the job); "detached": with
            the job.

    Raises:
        ValueError, TypeError: an argument is not valid, or the name is taken. Nothing is reserved.
        NotImplementedError: for the arguments that are not named here.
    """
    units = _checked(bundles)
    selectors = _selectors(bundle_label_selector, len(units))
    if strategy not in STRATEGIES:
        raise ValueError(f"Invalid placement group strategy {strategy}. Supported strategies are: {set(STRATEGIES)}.")
    if lifetime not in (None, "detached"):
        raise ValueError(f"Placement group `lifetime` argument must be either `None` or 'detached'. Got {lifetime}.")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"Placement group `name` argument must be a string, got {type(name)}.")
    others = {
        "_soft_target_node_id": _soft_target_node_id,
        "topology_strategy": topology_strategy,
    }
    for keyword, value in others.items():
        if value:
            raise NotImplementedError(f"placement_group({keyword}=...) is not supported; hint: leave it out")
    process = ensure()
    with process.engine.lock:
        ident = PlacementGroupID(process.next_task_id())
    namespace = process.job.namespace if process.job else ""
    spec = m.GroupSpec(bytes(ident), units, strategy, name or "", namespace, _owner(process, lifetime), selectors)
    process.groups.create(spec)
    return PlacementGroup(ident, [{name: float(amount) for name, amount in bundle.items()} for bundle in bundles])


def remove_placement_group(placement_group: PlacementGroup) -> None:
    """End a group: what runs in it is killed, and what it reserved is free when that has ended. Returns at once."""
    if not placement_group.is_empty:
        ensure().groups.remove(bytes(placement_group.id))


def get_placement_group(placement_group_name: str) -> PlacementGroup:
    """The group with this name in the namespace of the job.

    Raises:
        ValueError: there is none.
    """
    if not placement_group_name:
        raise ValueError("Please supply a non-empty value to get_placement_group")
    process = ensure()
    try:
        row = process.gcs.call(
            "placement_group", b"", placement_group_name, process.job.namespace if process.job else ""
        )
    except ValueError:
        raise ValueError(f"Failed to look up placement group with name: {placement_group_name}") from None
    return PlacementGroup(PlacementGroupID(row["group"]), row["bundles"])


def get_current_placement_group() -> PlacementGroup | None:
    """The group that the task or actor that asks runs in; None for none, and in a driver."""
    process = ensure()
    group = process.groups.running_in
    return PlacementGroup(PlacementGroupID(bytes.fromhex(group))) if group else None


def placement_group_table(placement_group: PlacementGroup | PlacementGroupID | None = None) -> dict[str, Any]:
    """What is known of one group, or of all by their ids in hex.

    Of the removed ones only the last are remembered.
    """
    process = ensure()
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
        "stats": {"scheduling_attempt": row["attempts"]},
    }


def _owner(process: Process, lifetime: str | None) -> bytes:
    """Whose end removes the group: a worker that runs tasks may end at any time, so theirs last as long as the job."""
    in_task = current.worker is not None and current.worker.actor is None
    return b"" if lifetime == "detached" or in_task else process.me


def _selectors(given: Any, bundles: int) -> list[str]:
    if not given:
        return []
    if not isinstance(given, list):
        raise ValueError(f"Placement group bundle label selectors must be a list, got {type(given)}.")
    if len(given) != bundles:
        raise ValueError(
            f"Invalid bundle label selector {given}. The length of `bundle_label_selector` should equal the length of "
            f"`bundles`, which is {bundles}."
        )
    for selector in given:
        problem = selector_problem(selector)
        if problem:
            raise ValueError(f"Bundle label selector {selector}: {problem}")
    return [to_strategy([conditions(selector)]) if selector else "" for selector in given]


def _checked(bundles: Any) -> list[dict[str, int]]:
    if not isinstance(bundles, list):
        raise ValueError(f"Placement group bundles must be a list, got {type(bundles)}.")
    if not bundles:
        raise ValueError(
            f"Bundles must be a non-empty list of resource dictionaries. {_EXAMPLE} Got empty list instead."
        )
    return [_checked_bundle(bundle) for bundle in bundles]


def _checked_bundle(bundle: Any) -> dict[str, int]:
    if (
        not isinstance(bundle, dict)
        or not all(isinstance(name, str) and name for name in bundle)
        or not all(isinstance(amount, (int, float)) for amount in bundle.values())
    ):
        raise ValueError(f"Bundles must be a non-empty list of resource dictionaries. {_EXAMPLE}")
    gpus = bundle.get("GPU", 0)
    if gpus > 1 and gpus != int(gpus):
        raise ValueError(f"GPU resource quantities >1 must be whole numbers. The specified quantity {gpus} is invalid.")
    units = exact_units(bundle)
    if not units:
        raise ValueError(
            "Bundles cannot be an empty dictionary or resources with only 0 values. "
            f"Bundles must be a non-empty list of resource dictionaries. {_EXAMPLE} Got {bundle}."
        )
    return units


def check_index(group: PlacementGroup, index: int) -> None:
    """Raise ValueError unless the group has a bundle with this index."""
    if group.is_empty:
        if index != ANY:
            raise ValueError("If placement group is not set, the value of bundle index must be -1.")
    elif index >= group.bundle_count or index < ANY:
        raise ValueError(
            f"placement group bundle index {index} is invalid. Valid placement group indexes: 0-{group.bundle_count}"
        )
