"""Which node: the head's view of every node, and the policies that choose among them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from hpcray.base.bundle_names import ALL_SLOTS, ANY, CAPTURING, GROUP, SLOTS, bundle_of, name_in
from hpcray.base.labels import PREFIX, from_strategy, tier
from hpcray.base.resources import Resources, add, fits, subtract
from hpcray.core.scheduler.nodes import NodeState, Request
from hpcray.core.scheduler.ranking import Changes, Rank, Ranking
from hpcray.core.scheduler.telling import describe, waiting_text, why_infeasible
from hpcray.core.scheduler.wants import near_node, node_affinity
from hpcray.wire.messages import NodeInfo, NodeView, Shape

PACK_UP_TO = 0.5
"""The hybrid policy fills nodes in index order up to this share, then takes the least utilised."""
RANKINGS = 256
"""So many kinds of requests are kept ranked; of others the ranking is made when they come back."""


class ClusterView:
    """All live nodes."""

    def __init__(self) -> None:
        self.nodes: dict[int, NodeState] = {}
        self.dead: dict[int, str] = {}
        self._feasible: dict[Shape, list[int]] = {}
        self._of_group: dict[str, list[Shape]] = {}
        self._names: dict[str, dict[int, set[str]]] = {}
        self._changes = Changes()
        self._rankings: OrderedDict[tuple[Shape, Shape, bool], Ranking] = OrderedDict()
        self._turns = 0

    def up(self, nodes: Iterable[NodeInfo]) -> None:
        """The cluster is up. Views that came earlier would be lost: raylets send theirs after they know the table."""
        for info in nodes:
            self.nodes[info.index] = NodeState(info, dict(info.total))
        self._forget_all()

    def lost(self, node: int, reason: str) -> None:
        """A node died."""
        self.nodes.pop(node, None)
        for there in self._names.values():
            there.pop(node, None)
        self.dead[node] = reason
        self._forget_all()

    def update(self, view: NodeView) -> bool:
        """Take in a view unless it is stale; whether the node has more of anything than we thought."""
        state = self.nodes.get(view.node)
        if state is None or view.version <= state.version:
            return False
        self._changes.note(view.node)
        return state.update(view)

    def worth_asking(self) -> None:
        """Time has passed: nodes that refused something may be asked again."""
        for node, state in self.nodes.items():
            if state.shunned:
                state.shunned.clear()
                self._changes.note(node)

    def feasible(self, shape: Shape) -> list[int]:
        """Nodes that could run the shape if they were empty, those a soft affinity prefers alone, in index order."""
        found = self._feasible.get(shape)
        if found is None:
            found = self._feasible[shape] = self._find_feasible(shape)
        return found

    def servers(self, place: Shape, hold: Shape) -> list[int]:
        """Of the nodes that could run it empty: those where tasks alone are in its way, if there are any."""
        nodes = self.feasible(place)
        wanted = dict(hold.resources)
        free = [node for node in nodes if fits(wanted, self.nodes[node].reachable())]
        return free or nodes

    def _find_feasible(self, shape: Shape) -> list[int]:
        if near_node(shape.strategy) is not None:  # any node will do, at worst
            return self.feasible(Shape(shape.resources, "", shape.env))
        request = dict(shape.resources)
        bundle = bundle_of(shape.resources)
        nodes: Iterable[int] = self.nodes
        if bundle is not None:
            nodes = self._names.get(bundle[0], ())
            self._of_group.setdefault(bundle[0], []).append(shape)
        found = [node for node in sorted(nodes) if fits(request, self.nodes[node].total)]
        if shape.strategy.startswith(PREFIX):
            _, wanted = from_strategy(shape.strategy)
            return [node for node in found if tier(wanted, self.nodes[node].labels) is not None]
        affinity = node_affinity(shape.strategy)
        if affinity is None:
            return found
        only, soft = affinity
        return [only] if only in found else found if soft else []

    def bundle_came(self, node: int, group: str, index: int, amounts: Resources) -> None:
        """A node has a bundle that may be used, and is empty. Later the node's views say what is free in it."""
        state, names = self.nodes[node], self._names.setdefault(group, {}).setdefault(node, set())
        for name, units in {**amounts, SLOTS: ALL_SLOTS}.items():
            for shown in (name_in(group, index, name), name_in(group, ANY, name)):
                for figures in (state.total, state.in_bundles):
                    figures[shown] = figures.get(shown, 0) + units
                names.add(shown)
        self._changes.note(node)
        self._group_changed(group)

    def bundles_left(self, node: int, group: str) -> None:
        """A node has no bundle of the group any more."""
        state, there = self.nodes.get(node), self._names.get(group, {})
        names = there.pop(node, ())
        if not there:
            self._names.pop(group, None)
        for figures in (state.total, state.in_bundles) if state is not None else ():
            for name in names:
                figures.pop(name, None)
        self._group_changed(group)

    def take(self, node: int, request: Request) -> None:
        """Promise resources of a node; its next view corrects."""
        subtract(self.nodes[node].available, dict(request))
        self._changes.note(node)

    def take_soft(self, node: int, amount: Resources) -> None:
        """Count an actor that was placed by more than it holds."""
        if node in self.nodes:
            add(self.nodes[node].soft, amount)
            self._changes.note(node)

    def give_soft(self, node: int, amount: Resources) -> None:
        """Such an actor left."""
        if node in self.nodes:
            subtract(self.nodes[node].soft, amount)
            self._changes.note(node)

    # ------------------------------------------------------------ choosing

    def any_room(self, shape: Shape) -> bool:
        """Whether some node seems to have room for one more."""
        return self._ranking(shape, shape).best() is not None

    def choose(self, shape: Shape, count: int, only: int | None = None, but: int = -1) -> list[tuple[int, int]]:
        """Spread up to `count` requests over nodes that have room, and take the resources.

        Args:
            only: on this node alone. but: not on this one.

        Returns:
            (node, how many) pairs; together perhaps fewer than `count`.
        """
        given: dict[int, int] = {}
        ranking = None if only is not None else self._ranking(shape, shape)
        for _ in range(count):
            node = ranking.best(but) if ranking is not None else only
            if node is None or node == but or not self._may(node, shape):
                break
            self._give(self.nodes[node], shape)
            given[node] = given.get(node, 0) + 1
        return sorted(given.items())

    def choose_for_actor(self, place: Shape, hold: Shape) -> int | None:
        """The node for one actor, and take what it holds: `place` ranks the nodes, `hold` must fit now."""
        node = self._ranking(place, hold, actor=True).best()
        if node is not None:
            self._give(self.nodes[node], hold)
        return node

    def roomy(self, shape: Shape, count: int) -> list[int]:
        """Up to `count` nodes with room for one, the best first."""
        return self._ranking(shape, shape).some(count)

    def _may(self, node: int, shape: Shape) -> bool:
        state = self.nodes.get(node)
        return state is not None and state.fits(shape) and node in self.feasible(shape)

    def _give(self, state: NodeState, shape: Shape) -> None:
        self._turns += 1
        state.turn = self._turns
        subtract(state.free(shape), dict(shape.resources))
        self._changes.note(state.index)

    def _ranking(self, place: Shape, hold: Shape, actor: bool = False) -> Ranking:
        if place.strategy in (GROUP, CAPTURING):  # on few nodes, and gone with its group
            return self._make_ranking(place, hold, actor)
        key = (place, hold, actor)
        found = self._rankings.get(key)
        if found is None:
            found = self._rankings[key] = self._make_ranking(place, hold, actor)
            if len(self._rankings) > RANKINGS:
                self._rankings.popitem(last=False)
        else:
            self._rankings.move_to_end(key)
        return found

    def _make_ranking(self, place: Shape, hold: Shape, actor: bool) -> Ranking:
        by_labels = place.strategy.startswith(PREFIX)
        spread, wanted = from_strategy(place.strategy) if by_labels else (place.strategy == "SPREAD", ())
        nodes = self.feasible(place)
        tiers = {node: tier(wanted, self.nodes[node].labels) or 0 for node in nodes} if by_labels else {}

        def rank(node: int) -> Rank | None:
            state = self.nodes[node]
            if not state.fits(hold):
                return None
            used = state.utilisation(place, actor)
            if used < PACK_UP_TO and not spread:
                return tiers.get(node, 0), 0.0, 0, node
            return tiers.get(node, 0), used, state.turn, node

        return Ranking(nodes, rank, self._changes)

    def _group_changed(self, group: str) -> None:
        for shape in self._of_group.pop(group, ()):
            self._feasible.pop(shape, None)

    def _forget_all(self) -> None:
        self._feasible.clear()
        self._of_group.clear()
        self._rankings.clear()

    # ------------------------------------------------------------ what people are told

    def describe(self, about: Resources | None = None) -> str:
        """What every node has; see `telling.describe`."""
        return describe(self.nodes, about)

    def why_infeasible(self, shape: Shape, what: str) -> str:
        """The sentence for a request that no node can ever serve."""
        return why_infeasible(self.nodes, self.dead, shape, what)

    def why_waiting(self, shape: Shape, what: str) -> str:
        """The sentence for a request that could be served, were it not for others."""
        request = dict(shape.resources)
        return waiting_text(what, request, self.describe(request))
