"""Public classes whose objects are values are compared and hashed as Ray's are; all others by identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpcray.api.placement_group import PlacementGroup, PlacementGroupID
from hpcray.api.scheduling_strategies import (
    DoesNotExist,
    Exists,
    In,
    LabelMatchExpression,
    NodeAffinitySchedulingStrategy,
    NodeLabelSchedulingStrategy,
    NotIn,
    PlacementGroupSchedulingStrategy,
)
from hpcray.compat.names.ids import NodeID, WorkerID
from hpcray.runtime.worker.replies import StreamingGeneratorStats

GROUP = PlacementGroup(PlacementGroupID(b"\1" * 13))

BY_IDENTITY: list[Callable[[], Any]] = [
    lambda: PlacementGroupSchedulingStrategy(GROUP),
    lambda: PlacementGroupSchedulingStrategy(None, 2, True),
    lambda: NodeAffinitySchedulingStrategy("01" * 28, soft=False),
    lambda: NodeLabelSchedulingStrategy({"zone": In("a")}),
    lambda: In("a"),
    lambda: NotIn("a"),
    Exists,
    DoesNotExist,
]
BY_VALUE: list[Callable[[], Any]] = [
    lambda: PlacementGroup(PlacementGroupID(b"\1" * 13)),
    lambda: StreamingGeneratorStats(0.5),
    lambda: NodeID(b"\1" * 28),
]


@pytest.mark.parametrize("make", BY_IDENTITY)
def test_these_are_compared_by_identity(make: Callable[[], Any]) -> None:
    one, other = make(), make()
    assert one == one and one != other and len({one, other, one}) == 2


@pytest.mark.parametrize("make", BY_VALUE)
def test_these_are_compared_by_value(make: Callable[[], Any]) -> None:
    one, other = make(), make()
    assert one == other and len({one, other}) == 1


def test_an_id_equals_only_ids_of_its_own_kind() -> None:
    assert NodeID(b"\1" * 28) != WorkerID(b"\1" * 28)
    assert len({NodeID(b"\1" * 28), WorkerID(b"\1" * 28)}) == 2


def test_statistics_of_a_generator_do_not_change() -> None:
    with pytest.raises(AttributeError):
        StreamingGeneratorStats(0.5).object_creation_dur_s = 1.0  # type: ignore[misc]


def test_a_strategy_shows_what_it_says() -> None:
    assert "placement_group_bundle_index=2" in repr(PlacementGroupSchedulingStrategy(None, 2))
    assert LabelMatchExpression("zone", Exists()).key == "zone"
