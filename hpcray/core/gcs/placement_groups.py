"""All placement groups of the job: planned, prepared on every node, committed; or undone and tried again.

The head plans with what it knows of every node, and asks each node of the plan to hold its bundles. When all have said
yes they are committed; if one refuses, dies, or does not answer in time, all are given back and the group waits on. So
a group has all its bundles or holds nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hpcray.base.bundle_names import bundle_of
from hpcray.base.ids import node_of, owner_of, raylet_of
from hpcray.base.resources import Resources, add
from hpcray.core.effects import Effect, Send
from hpcray.core.scheduler.placement import REPORT_AFTER, ClusterView, show
from hpcray.core.scheduler.planning import STRICT_PACK, STRICT_SPREAD, Plan, plan
from hpcray.core.scheduler.wants import ACTOR_KLASS
from hpcray.wire import messages as m

PENDING, CREATED, RESCHEDULING, REMOVED = "PENDING", "CREATED", "RESCHEDULING", "REMOVED"
ANSWER_WITHIN = 10.0
"""Nodes that have not answered by then are asked to forget it, and the group is tried again."""
TRIED_AT_ONCE = 16
"""So many waiting groups are looked at when a node has more room; all are with every tick."""
REMOVED_KEPT, IDS_KEPT = 1000, 100_000


@dataclass(slots=True, eq=False)
class Group:
    """One placement group.

    Attributes:
        nodes: of each bundle, -1 where it has none.
        chosen, awaited: the attempt under way: which bundle shall go where, and which nodes have not answered.
        avoid: nodes that refused since the last tick.
    """

    spec: m.GroupSpec
    state: str = PENDING
    nodes: list[int] = field(default_factory=list)
    chosen: Plan = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)
    attempt: int = 0
    asked_at: float = 0.0
    avoid: set[int] = field(default_factory=set)
    watchers: set[bytes] = field(default_factory=set)
    since: float = 0.0
    told: float = 0.0
    warned: bool = False
    reason: str = ""

    @property
    def key(self) -> str:
        return self.spec.group.hex()

    def title(self) -> str:
        name = f" {self.spec.name!r}" if self.spec.name else ""
        return f"placement group{name} {self.key}"

    def here(self, node: int) -> dict[int, Resources]:
        """What an attempt asks of one node."""
        return {index: self.spec.bundles[index] for index, at in sorted(self.chosen.items()) if at == node}


class PlacementGroups:
    """Registers, places, moves and removes groups.

    Attributes:
        on_removed: told, by its id in hex, that a group is removed.
    """

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._groups: dict[bytes, Group] = {}
        self._waiting: OrderedDict[bytes, Group] = OrderedDict()
        self._attempts: dict[bytes, Group] = {}
        self._names: dict[tuple[str, str], bytes] = {}
        self._owned: dict[bytes, set[bytes]] = {}
        self._early: dict[bytes, set[bytes]] = {}
        self._kept: deque[bytes] = deque()
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._dead: OrderedDict[bytes, None] = OrderedDict()
        self._dead_nodes: set[int] = set()
        self.on_removed: Callable[[float, str, list[Effect]], None] = lambda now, group, out: None

    # ------------------------------------------------------------ conversation with processes

    def create(self, now: float, src: bytes, msg: m.CreateGroup) -> list[Effect]:
        """Register a group and try to place it."""
        spec, out = msg.spec, list[Effect]()
        name = (spec.namespace, spec.name)
        if spec.name and name in self._names:
            text = (
                f"a placement group named {spec.name!r} exists in namespace {spec.namespace!r}; hint: take another "
                f"name, or get_placement_group({spec.name!r})"
            )
            return [Send(src, m.GcsReply(msg.req, False, text.encode()))] if msg.req else out
        if msg.req:
            out.append(Send(src, m.GcsReply(msg.req, True, b"")))
        group = self._groups[spec.group] = Group(spec, nodes=[-1] * len(spec.bundles), since=now, told=now)
        group.watchers = {src, *self._early.pop(spec.group, ())}
        if spec.name:
            self._names[name] = spec.group
        if spec.owner:
            self._owned.setdefault(spec.owner, set()).add(spec.group)
        if group.key in self._gone or (spec.owner and self._is_dead(spec.owner)):
            self._end(now, group, "it was removed before it was known, or its owner is gone", out)
        else:
            self._waiting[spec.group] = group
            self._try(now, group, out)
        return out

    def watch(self, src: bytes, msg: m.WatchGroup) -> list[Effect]:
        """Tell the state, now and at each change."""
        group = self._groups.get(msg.group)
        if group is not None:
            if group.state != REMOVED:
                group.watchers.add(src)
            return [Send(src, m.GroupState(msg.group, group.state, group.reason))]
        if self.removed(msg.group.hex()):
            return [Send(src, m.GroupState(msg.group, REMOVED, "it was removed"))]
        self._early.setdefault(msg.group, set()).add(src)
        return []

    def remove(self, now: float, msg: m.RemoveGroup) -> list[Effect]:
        """End what runs in it and give everything back."""
        out: list[Effect] = []
        group = self._groups.get(msg.group)
        if group is not None and group.state != REMOVED:
            self._end(now, group, "its placement group was removed", out)
        elif group is None and not self.removed(msg.group.hex()):
            # Its creation is on its way by another path: it is removed on arrival.
            self._forget_id(msg.group.hex())
        return out

    # ------------------------------------------------------------ conversation with raylets

    def prepared(self, now: float, node: int, msg: m.BundlesPrepared) -> tuple[list[Effect], list[int]]:
        """A node's answer. Returns the nodes that have bundles now which they had not before, too."""
        out: list[Effect] = []
        group = self._attempts.get(msg.group)
        if group is None or msg.attempt != group.attempt or node not in group.awaited:
            return out, []
        group.awaited.discard(node)
        if not msg.ok:
            group.avoid.add(node)
            self._undo(group, {node}, out)
            self._try(now, group, out)
            return out, []
        if group.awaited:
            return out, []
        return out, self._commit(group, out)

    def node_died(self, now: float, node: int) -> list[Effect]:
        """Bundles that were there get another place; attempts that count on it are undone."""
        out: list[Effect] = []
        self._dead_nodes.add(node)
        for watchers in self._early.values():
            watchers.difference_update({proc for proc in watchers if node_of(proc) == node})
        for owner in [owner for owner in self._owned if node_of(owner) == node]:
            self._owner_died(now, owner, out)
        for group in list(self._groups.values()):
            group.watchers = {proc for proc in group.watchers if node_of(proc) != node}
            if group.state == REMOVED:
                continue
            lost = node in group.nodes
            if lost:
                group.nodes = [-1 if at == node else at for at in group.nodes]
                self._view.bundles_left(node, group.key)
                group.since = group.told = now
                self._set_state(group, RESCHEDULING, f"node {node} died", out)
                self._waiting.setdefault(group.spec.group, group)
            if node in group.chosen.values():
                self._undo(group, {node}, out)
        self.retry(now, out, everything=True)
        return out

    def process_died(self, now: float, proc: bytes) -> list[Effect]:
        """Its groups end, unless they are detached."""
        out: list[Effect] = []
        self._dead[proc] = None
        if len(self._dead) > IDS_KEPT:
            self._dead.popitem(last=False)
        self._owner_died(now, proc, out)
        for group in self._groups.values() if self._groups else ():
            group.watchers.discard(proc)
        for watchers in self._early.values():
            watchers.discard(proc)
        return out

    def retry(self, now: float, out: list[Effect], everything: bool = False) -> None:
        """Place what waits, the oldest first."""
        idle = [group for group in self._waiting.values() if not group.chosen]
        for group in idle if everything else idle[:TRIED_AT_ONCE]:
            self._try(now, group, out)

    def tick(self, now: float) -> list[Effect]:
        """Retry; undo what nobody answers; say why somebody waits."""
        out: list[Effect] = []
        for group in list(self._attempts.values()):
            if now - group.asked_at > ANSWER_WITHIN:
                group.avoid |= group.awaited
                self._undo(group, set(), out)
        for group in self._waiting.values():
            group.avoid.clear()
        self.retry(now, out, everything=True)
        for group in self._waiting.values():
            if now - group.told >= REPORT_AFTER and not group.warned:
                group.warned = True
                self._tell_creator(group, self._why(group), True, out)
        return out

    # ------------------------------------------------------------ questions

    def removed(self, group: str) -> bool:
        """Whether the group with this id (in hex) is no more, or never comes."""
        known = self._groups.get(bytes.fromhex(group))
        if known is not None:
            return known.state == REMOVED
        return group in self._gone or self._is_dead(owner_of(bytes.fromhex(group)))

    def gone(self, shape: m.Shape) -> bool:
        """Whether a request is for a group that is removed."""
        bundle = bundle_of(shape.resources)
        return bundle is not None and self.removed(bundle[0])

    def named(self, name: str, namespace: str) -> Group | None:
        """The group with this name."""
        ident = self._names.get((namespace, name))
        return None if ident is None else self._groups[ident]

    def find(self, group: bytes) -> Group | None:
        """The group with this id, also for a while after it was removed."""
        return self._groups.get(group)

    def all(self) -> list[Group]:
        """Every group, the last removed ones included."""
        return list(self._groups.values())

    # ------------------------------------------------------------ inside

    def _try(self, now: float, group: Group, out: list[Effect]) -> None:
        """Plan with what is free now and ask the nodes, unless there is no room."""
        bundles = {index: group.spec.bundles[index] for index, node in enumerate(group.nodes) if node < 0}
        free = {n: state.available for n, state in self._view.nodes.items() if n not in group.avoid}
        chosen = plan(bundles, group.spec.strategy, free, self._used(group))
        if chosen is None:
            if self._view.nodes and not group.warned and not self._possible(group):
                group.warned = True
                self._tell_creator(group, self._why_never(group), False, out)
            return
        group.chosen = chosen
        group.attempt += 1
        group.asked_at = now
        group.awaited = set(chosen.values())
        self._attempts[group.spec.group] = group
        for index, node in chosen.items():
            self._view.take(node, tuple(bundles[index].items()))
        for node in sorted(group.awaited):
            alone = len(group.awaited) == 1
            msg = m.PrepareBundles(group.spec.group, group.attempt, group.here(node), alone)
            out.append(Send(raylet_of(node), msg))

    def _undo(self, group: Group, without: set[int], out: list[Effect]) -> None:
        """Take an attempt back: nodes forget it, but for those that hold nothing."""
        for node in sorted(set(group.chosen.values()) - without):
            indices = list(group.here(node))
            out.append(Send(raylet_of(node), m.ReturnBundles(group.spec.group, indices, "it was not completed")))
        group.chosen = {}
        group.awaited = set()
        self._attempts.pop(group.spec.group, None)

    def _commit(self, group: Group, out: list[Effect]) -> list[int]:
        nodes = sorted(set(group.chosen.values()))
        for node in nodes if len(nodes) > 1 else ():
            out.append(Send(raylet_of(node), m.CommitBundles(group.spec.group)))
        for index, node in group.chosen.items():
            group.nodes[index] = node
            self._view.bundle_came(node, group.key, index, group.spec.bundles[index])
        group.chosen = {}
        self._attempts.pop(group.spec.group, None)
        self._waiting.pop(group.spec.group, None)
        group.warned = False
        self._set_state(group, CREATED, "", out)
        return nodes

    def _end(self, now: float, group: Group, reason: str, out: list[Effect]) -> None:
        self._undo(group, set(), out)
        ident = group.spec.group
        for node in sorted({node for node in group.nodes if node >= 0}):
            indices = [index for index, at in enumerate(group.nodes) if at == node]
            out.append(Send(raylet_of(node), m.ReturnBundles(ident, indices, reason)))
            self._view.bundles_left(node, group.key)
        self._waiting.pop(ident, None)
        self._names.pop((group.spec.namespace, group.spec.name), None)
        mine = self._owned.get(group.spec.owner)
        if mine is not None:
            mine.discard(ident)
            if not mine:
                del self._owned[group.spec.owner]
        self._set_state(group, REMOVED, reason, out)
        group.watchers.clear()
        self._kept.append(ident)
        self._forget_id(group.key)
        if len(self._kept) > REMOVED_KEPT:
            self._groups.pop(self._kept.popleft(), None)
        self.on_removed(now, group.key, out)

    def _forget_id(self, group: str) -> None:
        self._gone[group] = None
        if len(self._gone) > IDS_KEPT:
            self._gone.popitem(last=False)

    def _owner_died(self, now: float, owner: bytes, out: list[Effect]) -> None:
        for ident in list(self._owned.get(owner, ())):
            self._end(now, self._groups[ident], "the owner of its placement group is gone", out)

    def _is_dead(self, proc: bytes) -> bool:
        return proc in self._dead or node_of(proc) in self._dead_nodes

    def _used(self, group: Group) -> dict[int, int]:
        used: dict[int, int] = {}
        for node in group.nodes:
            if node >= 0:
                used[node] = used.get(node, 0) + 1
        return used

    def _possible(self, group: Group) -> bool:
        """Whether the cluster could hold the group if nothing else were there."""
        empty = {node: state.info.total for node, state in self._view.nodes.items()}
        return plan(dict(enumerate(group.spec.bundles)), group.spec.strategy, empty, {}) is not None

    def _set_state(self, group: Group, state: str, reason: str, out: list[Effect]) -> None:
        group.state, group.reason = state, reason
        out.extend(Send(proc, m.GroupState(group.spec.group, state, reason)) for proc in sorted(group.watchers))

    def _tell_creator(self, group: Group, text: str, waits: bool, out: list[Effect]) -> None:
        out.append(Send(owner_of(group.spec.group), m.Infeasible(ACTOR_KLASS, text, waits)))

    def _asks(self, group: Group) -> str:
        kinds: dict[str, int] = {}
        for amounts in group.spec.bundles:
            kinds[show(amounts)] = kinds.get(show(amounts), 0) + 1
        bundles = ", ".join(text if count == 1 else f"{count} x {text}" for text, count in kinds.items())
        return f"{group.title()} asks for {bundles} ({group.spec.strategy})"

    def _why_never(self, group: Group) -> str:
        hint = "ask for less, or start nodes that have it"
        if group.spec.strategy == STRICT_SPREAD and len(group.spec.bundles) > len(self._view.nodes):
            hint = f"there are {len(self._view.nodes)} nodes for {len(group.spec.bundles)} bundles: use SPREAD"
        elif group.spec.strategy == STRICT_PACK:
            hint = "use PACK where it need not be one node"
        return (
            f"{self._asks(group)}, for which there is no place even when all else has ended. What there is: "
            f"{self._view.describe()}. hint: {hint}; it waits"
        )

    def _why(self, group: Group) -> str:
        about: Resources = {}
        for amounts in group.spec.bundles:
            add(about, amounts)
        return (
            f"{self._asks(group)} and has waited for {REPORT_AFTER:g} s, while others hold what it needs. Free now: "
            f"{self._view.describe(about)}. hint: wait, or hold less (actors and other groups keep theirs for life)"
        )
