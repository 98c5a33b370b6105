"""`ray.util.placement_group`: checks that Ray's libraries make before they create a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcray.api.placement_group import check_request
from hpcray.compat.names.utils import PLACEMENT_GROUP_BUNDLE_RESOURCE_NAME


def validate_placement_group(
    bundles: list[dict[str, float]],
    strategy: str | None = None,
    lifetime: str | None = None,
    _soft_target_node_id: str | None = None,
    bundle_label_selector: list[dict[str, str]] | None = None,
    topology_strategy: dict[str, str] | None = None,
) -> None:
    """Raise ValueError if `placement_group()` would."""
    check_request(bundles, strategy, lifetime, _soft_target_node_id, bundle_label_selector, topology_strategy)


def _valid_resource_shape(resources: Mapping[str, float], bundle_specs: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a bundle has all these resources."""
    wanted = {name: amount for name, amount in resources.items() if name != PLACEMENT_GROUP_BUNDLE_RESOURCE_NAME}
    return any(all(bundle.get(name, 0) >= amount for name, amount in wanted.items()) for bundle in bundle_specs)
