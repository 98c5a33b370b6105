"""Values of the option `scheduling_strategy`: on which nodes a task or actor runs."""

from __future__ import annotations

from hpcray.api.scheduling_strategies import (
    DoesNotExist,
    Exists,
    In,
    LabelMatchExpressionsT,
    NodeAffinitySchedulingStrategy,
    NodeLabelSchedulingStrategy,
    NotIn,
    PlacementGroupSchedulingStrategy,
    SchedulingStrategyT,
)

__all__ = [
    "DoesNotExist",
    "Exists",
    "In",
    "LabelMatchExpressionsT",
    "NodeAffinitySchedulingStrategy",
    "NodeLabelSchedulingStrategy",
    "NotIn",
    "PlacementGroupSchedulingStrategy",
    "SchedulingStrategyT",
]
