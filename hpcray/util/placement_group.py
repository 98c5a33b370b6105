"""Placement groups, by Ray's module name."""

from __future__ import annotations

from hpcray.api.placement_group import (
    PlacementGroup,
    PlacementGroupID,
    get_current_placement_group,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

__all__ = [
    "PlacementGroup",
    "PlacementGroupID",
    "get_current_placement_group",
    "get_placement_group",
    "placement_group",
    "placement_group_table",
    "remove_placement_group",
]
