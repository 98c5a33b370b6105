"""Which node: the head's view of every node, and the policies that choose among them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from hpcray.base.bundle_names import ALL_SLOTS, ANY, CAPTURING, GROUP, SLOTS, bundle_of, name_in, plain
from hpcray.base.resources import Resources, add, fits, subtract, to_amounts
from hpcray.core.scheduler.wants import node_affinity
from hpcray.wire.messages import NodeInfo, NodeView, Shape

PACK_UP_TO = 0.5
"""The hybrid policy fills nodes in index order up to this share, then takes the least utilised."""
REPORT_AFTER = 10.0
"""Whoever has waited this long, in seconds, is told for what."""
Request = tuple[tuple[str, int], ...]


@dataclass(slots=True, eq=False)
class NodeState:
    """One live node as the head sees it: `available` is its last view minus what the head promised since.

    `soft` counts actors that were placed by a request they do not hold (a default actor is placed by one CPU and holds
    none); it ranks nodes for actors, and blocks nothing. `shunned`: requests it refused, until its views (`said`) show
    more than before, or the next tick. `total` includes what bundles of placement groups have here; `in_bundles`: what
    is free in them.
    """

    info: NodeInfo
    available: Resources
    version: int = 0
    said: Resources = field(default_factory=dict)
    soft: Resources = field(default_factory=dict)
    shunned: set[Request] = field(default_factory=set)
    total: Resources = field(init=False)
    in_bundles: Resources = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.total = dict(self.info.total)

    @property
    def index(self) -> int:
        return self.info.index

    def fits(self, shape: Shape) -> bool:
        """Whether the node seems to have room for one more."""
        if shape.resources in self.shunned:
            return False
        free = self.free(shape)
        return all(free.get(name, 0) >= units for name, units in shape.resources)

    def free(self, shape: Shape) -> Resources:
        """The books that a shape is about: the node's, or those of its placement groups."""
        return self.in_bundles if shape.strategy in (GROUP, CAPTURING) else self.available

    def capacity(self, shape: Shape) -> int:
        """How many would run at once if the node were empty (at least 1 for an empty request)."""
        total = self.total
        return min((total.get(name, 0) // units for name, units in shape.resources if units), default=1)

    def utilisation(self, shape: Shape, soft: bool = False) -> float:
        """The largest used share among the requested resources and CPU; `soft` counts soft actors too."""
        worst = 0.0
        books = self.free(shape)
        names = {name for name, _ in shape.resources}
        for name in names if books is self.in_bundles else {"CPU", *names}:
            total = self.total.get(name, 0)
            if total:
                free = books.get(name, 0) - (self.soft.get(name, 0) if soft else 0)
                worst = max(worst, 1.0 - free / total)
        return worst


class ClusterView:
    """All live nodes."""

    def __init__(self) -> None:
        self.nodes: dict[int, NodeState] = {}
        self.dead: dict[int, str] = {}
        self._feasible: dict[Shape, list[int]] = {}
        self._of_group: dict[str, list[Shape]] = {}
        self._names: dict[tuple[int, str], set[str]] = {}
        self._cursor = 0

    def up(self, nodes: Iterable[NodeInfo]) -> None:
        """The cluster is up. Views that came earlier would be lost: raylets send theirs after they know the table."""
        for info in nodes:
            self.nodes[info.index] = NodeState(info, dict(info.total))
        self._feasible.clear()

    def lost(self, node: int, reason: str) -> None:
        """A node died."""
        self.nodes.pop(node, None)
        self._names = {key: names for key, names in self._names.items() if key[0] != node}
        self.dead[node] = reason
        self._feasible.clear()

    def update(self, view: NodeView) -> bool:
        """Take in a view unless it is stale; whether the node has more of anything than we thought."""
        state = self.nodes.get(view.node)
        if state is None or view.version <= state.version:
            return False
        state.version = view.version
        thought, state.available = state.available, dict(view.available)
        room = {name: units for name, units in view.bundles.items() if name in state.total}  # not of removed groups
        more = _more(room, state.in_bundles)
        state.in_bundles.update(room)
        said, state.said = state.said, view.available
        # A node that refuses for want of workers keeps saying that it has room: only news make it worth asking again.
        if state.shunned and (more or _more(view.available, said)):
            state.shunned.clear()
            return True
        return more or _more(view.available, thought)

    def feasible(self, shape: Shape) -> list[int]:
        """Nodes that could run the shape if they were empty, those a soft affinity prefers alone, in index order."""
        found = self._feasible.get(shape)
        if found is None:
            request = dict(shape.resources)
            found = [index for index, state in sorted(self.nodes.items()) if fits(request, state.total)]
            affinity = node_affinity(shape.strategy)
            if affinity is not None:
                wanted, soft = affinity
                if wanted in found:
                    found = [wanted]
                elif not soft:
                    found = []
            self._feasible[shape] = found
            bundle = bundle_of(shape.resources)
            if bundle is not None:
                self._of_group.setdefault(bundle[0], []).append(shape)
        return found

    def bundle_came(self, node: int, group: str, index: int, amounts: Resources) -> None:
        """A node has a bundle (that may be used). What is free in it is for the node's views to say."""
        total, names = self.nodes[node].total, self._names.setdefault((node, group), set())
        for name, units in {**amounts, SLOTS: ALL_SLOTS}.items():
            for shown in (name_in(group, index, name), name_in(group, ANY, name)):
                total[shown] = total.get(shown, 0) + units
                names.add(shown)
        self._group_changed(group)

    def bundles_left(self, node: int, group: str) -> None:
        """A node has no bundle of the group any more."""
        state = self.nodes.get(node)
        names = self._names.pop((node, group), ())
        for figures in (state.total, state.in_bundles) if state is not None else ():
            for name in names:
                figures.pop(name, None)
        self._group_changed(group)

    def _group_changed(self, group: str) -> None:
        for shape in self._of_group.pop(group, ()):
            self._feasible.pop(shape, None)

    def take(self, node: int, request: Request) -> None:
        """Promise resources of a node; its next view corrects."""
        subtract(self.nodes[node].available, dict(request))

    def take_soft(self, node: int, amount: Resources) -> None:
        """Count an actor that was placed by more than it holds."""
        if node in self.nodes:
            add(self.nodes[node].soft, amount)

    def give_soft(self, node: int, amount: Resources) -> None:
        """Such an actor left."""
        if node in self.nodes:
            subtract(self.nodes[node].soft, amount)

    def choose(self, shape: Shape, count: int, candidates: Iterable[int]) -> list[tuple[int, int]]:
        """Spread up to `count` requests over candidates that have room, and take the resources.

        Returns:
            (node, how many) pairs; together perhaps fewer than `count`.
        """
        states = [state for index in candidates if (state := self.nodes.get(index)) is not None and state.fits(shape)]
        given: dict[int, int] = {}
        if shape.strategy != "SPREAD":
            for state in states:
                while count and state.fits(shape) and state.utilisation(shape) < PACK_UP_TO:
                    count -= self._give(state, shape, given)
        ring = max(self.nodes, default=0) + 1
        heap = [self._rank(state, shape, given, ring) for state in states if state.fits(shape)]
        heapq.heapify(heap)
        while count and heap:
            state = self.nodes[heap[0][-1]]
            count -= self._give(state, shape, given)
            self._cursor = state.index + 1
            if state.fits(shape):
                heapq.heapreplace(heap, self._rank(state, shape, given, ring))
            else:
                heapq.heappop(heap)
        return sorted(given.items())

    def choose_for_actor(self, place: Shape, hold: Shape) -> int | None:
        """The node for one actor, and take what it holds: `place` ranks the nodes, `hold` must fit now."""
        states = [state for index in self.feasible(place) if (state := self.nodes[index]).fits(hold)]
        if not states:
            return None
        ring = max(self.nodes) + 1

        def rank(state: NodeState) -> tuple[float, int]:
            used = state.utilisation(place, soft=True)
            if place.strategy != "SPREAD":
                return (0.0, state.index) if used < PACK_UP_TO else (used, state.index)
            return used, (state.index - self._cursor) % ring

        best = min(states, key=rank)
        self._cursor = best.index + 1
        subtract(best.free(hold), dict(hold.resources))
        return best.index

    def describe(self, about: Resources | None = None) -> str:
        """What every node has, for people; nodes with the same resources together.

        Args:
            about: only these resources, and how much of them is free.
        """
        groups: dict[str, list[int]] = {}
        for index, state in sorted(self.nodes.items()):
            text = (
                show(state.info.total)
                if about is None
                else free_of(about, {**state.available, **state.in_bundles}, state.total)
            )
            groups.setdefault(text, []).append(index)
        parts = []
        for text, nodes in groups.items():
            hosts = sorted({self.nodes[index].info.host for index in nodes})
            where = f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(map(str, nodes[:16]))}"
            more = " …" if len(nodes) > 16 else ""
            parts.append(f"{where}{more} ({', '.join(hosts[:4])}{' …' if len(hosts) > 4 else ''}): {text}")
        return "; ".join(parts) or "there is no node"

    def why_infeasible(self, shape: Shape, what: str) -> str:
        """The sentence for a request that no node can ever serve."""
        text = f"{what} asks for {show(dict(shape.resources))}, which no node can serve"
        affinity = node_affinity(shape.strategy)
        if affinity is not None:
            index = affinity[0]
            died = f" (it died: {self.dead[index]})" if index in self.dead else ""
            text = f"{what} asks for {show(dict(shape.resources))} on node {index}{died}, which cannot serve it"
        return f"{text}. What there is: {self.describe()}. hint: ask for less, or start nodes that have it; it waits"

    def why_waiting(self, shape: Shape, what: str) -> str:
        """The sentence for a request that could be served, were it not for others."""
        request = dict(shape.resources)
        return waiting_text(what, request, self.describe(request))

    def _give(self, state: NodeState, shape: Shape, given: dict[int, int]) -> int:
        subtract(state.free(shape), dict(shape.resources))
        given[state.index] = given.get(state.index, 0) + 1
        return 1

    def _rank(self, state: NodeState, shape: Shape, given: dict[int, int], ring: int) -> tuple[float, int, int, int]:
        turn = (state.index - self._cursor) % ring
        return state.utilisation(shape), given.get(state.index, 0), turn, state.index


def _more(new: Resources, old: Resources) -> bool:
    return any(units > old.get(name, 0) for name, units in new.items())


def free_of(about: Resources, available: Resources, total: Resources) -> str:
    """`{CPU: 1} of {CPU: 4}`, for the resources in `about`."""
    return " of ".join(show({name: amounts.get(name, 0) for name in about}) for amounts in (available, total))


def waiting_text(what: str, request: Resources, there: str) -> str:
    """The sentence for a request that waits for others; `there` says what is free."""
    if bundle_of(request.items()) is not None:
        what += " in a placement group"
    hint = "hint: wait, hold less (actors keep theirs for life), or start more nodes; `hpcray status` shows more"
    if "GPU" in request:
        hint += ". A GPU that is shared by fractions serves no whole request"
    return (
        f"{what} asks for {show(request)} and has waited for {REPORT_AFTER:g} s, while others hold what it needs. "
        f"Free now: {there}. {hint}"
    )


def show(request: Resources) -> str:
    """`{CPU: 4, GPU: 0.5}`, bytes of memory in GiB."""
    parts = []
    for name, amount in sorted(to_amounts(plain(request)).items()):
        if name in ("memory", "object_store_memory"):
            parts.append(f"{name}: {amount / 2**30:.1f} GiB")
        elif not name.startswith("node:"):
            parts.append(f"{name}: {amount:g}")
    return "{" + ", ".join(parts) + "}"
