"""`ray.util.placement_group`: what it holds beside hpcray's."""

from __future__ import annotations

from hpcray.api.placement_group import STRATEGIES
from hpcray.api.placement_group import check_index as check_placement_group_index

VALID_PLACEMENT_GROUP_STRATEGIES = set(STRATEGIES)

__all__ = ["VALID_PLACEMENT_GROUP_STRATEGIES", "check_placement_group_index"]
