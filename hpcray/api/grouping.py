"""Which placement group a task or actor runs in: what it was given, or that of its parent where that captures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hpcray.api.options import exact_units
from hpcray.api.placement_group import PlacementGroup, check_index, get_current_placement_group
from hpcray.api.placing import resolved
from hpcray.api.scheduling import PlacementGroupSchedulingStrategy
from hpcray.base.bundle_names import ANY, CAPTURING, GROUP, names_in
from hpcray.base.labels import PREFIX as LABELS
from hpcray.base.resources import fits, to_amounts
from hpcray.runtime.process import Process
from hpcray.wire.messages import Shape


def placed(process: Process, given: Mapping[str, Any], hold: Shape, place: Shape, what: str) -> tuple[Shape, Shape]:
    """The shapes of a task or actor as raylets know them: node ids and placement groups resolved.

    Args:
        given: its options. hold: what it holds. place: what it needs to start; of tasks the same.
        what: what it is, for people.

    Raises:
        ValueError: there is no such node or bundle, or no bundle that it would fit in.
    """
    found = _group(process, given)
    hold, place = resolved(process, hold), (resolved(process, place) if place is not hold else hold)
    if found is None:
        return hold, (hold if place is hold else place)
    group, index, captures = found
    _check_fits(group, hold, place, what)
    strategy = CAPTURING if captures else GROUP
    return _inside(group, index, strategy, hold), _inside(group, index, strategy, place)


def _inside(group: PlacementGroup, index: int, strategy: str, shape: Shape) -> Shape:
    if shape.strategy.startswith(LABELS):
        raise NotImplementedError(
            "label_selector inside a placement group is not supported; hint: leave it out, or give the group's bundles "
            "conditions by placement_group(bundle_label_selector=...)"
        )
    names = names_in(group.id.hex(), index, dict(shape.resources))
    return msgspec.structs.replace(shape, resources=tuple(sorted(names.items())), strategy=strategy)


def _group(process: Process, given: Mapping[str, Any]) -> tuple[PlacementGroup, int, bool] | None:
    """Group, bundle index, and whether children are captured; None for no group."""
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
        captures = process.groups.captures
    if isinstance(group, str) and group == "default":
        group = get_current_placement_group() if captures else None
    group = group or PlacementGroup.empty()
    if not isinstance(group, PlacementGroup):
        raise ValueError(f"a placement group must be a PlacementGroup, 'default' or None, but is {group!r}")
    check_index(group, index)
    return None if group.is_empty else (group, index, bool(captures))


def _check_fits(group: PlacementGroup, hold: Shape, place: Shape, what: str) -> None:
    bundles = group.bundle_specs
    units = [exact_units(bundle) for bundle in bundles]
    for shape in (hold, place):
        if any(fits(dict(shape.resources), bundle) for bundle in units):
            continue
        asked = to_amounts(dict(shape.resources))
        if shape is hold:
            raise ValueError(
                f"Cannot schedule {what} with the placement group because the resource request {asked} cannot fit into "
                f"any bundles for the placement group, {bundles}."
            )
        raise ValueError(
            f"Cannot schedule {what} with the placement group because the actor requires {asked.get('CPU', 0)} CPU for "
            f"creation, but it cannot fit into any bundles for the placement group, {bundles}. Consider creating a "
            "placement group with CPU resources."
        )
