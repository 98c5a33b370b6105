"""Counters that the operators of an iterator share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from hpcray.api.actor_handle import ActorHandle
from hpcray.util.debug import _Timer


class MetricsContext:
    """Values that the operators of a local iterator leave for each other.

    Attributes:
        counters: numbers by name, 0 at first.
        timers: stopwatches by name.
        info: anything else, by name.
        current_actor: the actor that produced the present item, in `gather_async`.
    """

    def __init__(self) -> None:
        self.counters: defaultdict[str, float] = defaultdict(int)
        self.timers: defaultdict[str, _Timer] = defaultdict(_Timer)
        self.info: dict[str, Any] = {}
        self.current_actor: ActorHandle | None = None

    def save(self) -> dict[str, Any]:
        """Return counters and info as plain dicts. Timers are left out."""
        return {"counters": dict(self.counters), "info": dict(self.info), "timers": None}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take over what `save` returned, and forget the rest."""
        self.counters.clear()
        self.counters.update(values["counters"])
        self.timers.clear()
        self.info = values["info"]


class SharedMetrics:
    """A reference to a context. The union of iterators makes all of their references point to one context.

    Args:
        metrics: the context; None: a new one.
        parents: references that follow this one.
    """

    def __init__(self, metrics: MetricsContext | None = None, parents: Sequence[SharedMetrics] | None = None) -> None:
        self.parents = list(parents or ())
        self.set(metrics or MetricsContext())

    def set(self, metrics: MetricsContext) -> None:
        """Point this reference and its parents, recursively, to a context."""
        self.metrics = metrics
        for parent in self.parents:
            parent.set(metrics)

    def get(self) -> MetricsContext:
        """Return the context."""
        return self.metrics
