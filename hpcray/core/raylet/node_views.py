"""Views of what is free on a node, for the GCS: what they contain, and when they are sent."""

from __future__ import annotations

from collections.abc import Iterable

from hpcray.common.resources import UNIT, Resources
from hpcray.core.raylet.local_resources import LocalResources
from hpcray.protocol.messages import NodeView

DECREASE_REPORT_DELAY = 0.1
"""Seconds after the last view at which a decrease of free resources is reported at the latest; an increase at once."""
SMALL_CLUSTER = 64
"""Nodes up to which an increase is reported at once."""
REPORT_INTERVAL_PER_NODE = 1e-4
"""In larger clusters a node sends views at most once in this many seconds, times the number of
nodes: the head reads at most ten thousand of them in a second, however many nodes there are."""
AWAITED_SHARE = 0.1
"""Share of this interval after which a view reports more of what requests wait for anywhere."""
OBJECT_STORE_MEMORY = "object_store_memory"
_STORE_REPORT_STEPS = 1000
"""A change of the store's use by less than one in so many of its bytes is not reported."""


class NodeViewReporter:
    """The views that a node sends to the GCS.

    Args:
        resources: what the node has; only read, but for what bundles note as unreported.
        cluster_size: number of nodes that report to the same GCS.
    """

    def __init__(self, resources: LocalResources, cluster_size: int) -> None:
        self._node = resources.node
        self._pool = resources.pool
        self._bundles = resources.bundles
        self._version = 0
        self._reported: Resources = {}
        self._reported_actors: Resources = {}
        self._reported_at = float("-inf")
        self._report_interval = self._quiet_for = 0.0
        self._promised = False
        self._awaited: frozenset[str] = frozenset()
        self._store_used = 0
        self._store_changed = False
        self.set_report_interval(cluster_size)

    def set_report_interval(self, cluster_size: int) -> None:
        """Derive the least time between two views from the number of nodes that report to the same head."""
        self._report_interval = REPORT_INTERVAL_PER_NODE * cluster_size if cluster_size > SMALL_CLUSTER else 0.0
        self._quiet_for = min(self._report_interval, DECREASE_REPORT_DELAY)

    def note_contention(self, lacking: Iterable[str]) -> None:
        """Requests wait in the cluster because these resources are short; none: no request waits."""
        self._awaited = frozenset(lacking)

    def note_promise(self, request: Iterable[tuple[str, int]]) -> bool:
        """The GCS has granted leases here, and counts their resources as taken ahead of this node's next view.

        In a large cluster it would read such a view for each grant. There it gets the next one when that is due: what
        this node grants as promised the GCS knows already. The next view is a full one, as a view that crossed the
        grant undid the promise.

        Args:
            request: units of what the GCS counts as taken; nothing for a grant that may queue here, or a withdrawal.

        Returns:
            False in a small cluster: the view is to be sent at once.
        """
        if not self._report_interval:
            return False
        for name, units in request:
            self._promised = True
            if name in self._reported:
                self._reported[name] -= units
        return True

    def note_store_use(self, used: int) -> None:
        """So many bytes of the object store are in use. It is reported as less free, which no request feels."""
        units = used * UNIT
        least = self._pool.total.get(OBJECT_STORE_MEMORY, 0) // _STORE_REPORT_STEPS
        if units != self._store_used and (not units or abs(units - self._store_used) >= least):
            self._store_used, self._store_changed = units, True

    def next_view(self, now: float, force: bool = False) -> NodeView | None:
        """The message that reports to the GCS what has changed of what is free; None while nothing urgent has.

        Args:
            force: report everything: the GCS may think otherwise.
        """
        elapsed = now - self._reported_at
        early = not force and elapsed < self._quiet_for
        if early and not (elapsed >= self._report_interval * AWAITED_SHARE and self._has_awaited()):
            return None
        pool, reported = self._pool, self._reported
        available, actors = pool.available, pool.held_by_actors
        bundles_changed = self._bundles.has_unreported or self._store_changed
        if not force:
            if not early and not bundles_changed:
                if not self._promised and reported == available and self._reported_actors == actors:
                    return None
                if elapsed < DECREASE_REPORT_DELAY and not any(
                    units > reported.get(name, units - 1) for name, units in available.items()
                ):
                    return None
            force = self._promised
        self._promised = False
        self._version += 1
        self._reported_at = now
        free = {n: units for n, units in available.items() if force or reported.get(n) != units}
        if OBJECT_STORE_MEMORY in available and (self._store_changed or OBJECT_STORE_MEMORY in free):
            free[OBJECT_STORE_MEMORY] = max(0, available[OBJECT_STORE_MEMORY] - self._store_used)
        self._store_changed = False
        held = {n: actors.get(n, 0) for n in available if force or actors.get(n) != self._reported_actors.get(n)}
        self._reported, self._reported_actors = dict(available), dict(actors)
        return NodeView(self._node, self._version, free, self._bundles.take_unreported(), held)

    def _has_awaited(self) -> bool:
        """Return True if there is more than was reported of what requests wait for anywhere."""
        available, reported = self._pool.available, self._reported
        for name in self._awaited:
            if available.get(name, 0) > reported.get(name, 0):
                return True
        return bool(self._awaited) and self._bundles.has_unreported and self._bundles.are_unreported(self._awaited)
