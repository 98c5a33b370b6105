"""The static handler tables of a raylet: `runtime.raylet.raylet` and `runtime.node.cluster_member`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from hpcray.core.gcs import gcs, node_manager
from hpcray.core.object_store import object_store
from hpcray.core.raylet import local_lease_manager
from hpcray.runtime.node import cluster_member
from hpcray.runtime.raylet import raylet


def test_no_message_and_no_effect_of_a_raylet_has_two_handlers() -> None:
    assert not raylet.HANDLERS.keys() & cluster_member.HANDLERS.keys()
    assert not raylet.EFFECT_HANDLERS.keys() & cluster_member.EFFECT_HANDLERS.keys()


@pytest.mark.parametrize(
    "handled",
    [gcs.RECOVERING_HANDLES, node_manager.HANDLES, object_store.HANDLES, local_lease_manager.HANDLES],
    ids=["gcs", "node_manager", "object_store", "lease_manager"],
)
def test_a_raylet_has_a_handler_for_every_message_of_its_cores(handled: Iterable[type]) -> None:
    assert set(handled) <= raylet.HANDLERS.keys() | cluster_member.HANDLERS.keys()
