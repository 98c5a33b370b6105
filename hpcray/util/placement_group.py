"""Placement groups, by Ray's module name."""

from __future__ import annotations

from hpcray.api.placement_group import (
    STRATEGIES,
    PlacementGroup,
    PlacementGroupID,
    get_current_placement_group,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from hpcray.api.placement_group import check_index as check_placement_group_index

VALID_PLACEMENT_GROUP_STRATEGIES = set(STRATEGIES)

__all__ = [
    "VALID_PLACEMENT_GROUP_STRATEGIES",
    "PlacementGroup",
    "PlacementGroupID",
    "check_placement_group_index",
    "get_current_placement_group",
    "get_placement_group",
    "placement_group",
    "placement_group_table",
    "remove_placement_group",
]
