"""All placement groups of the job: planned, prepared on every node, committed; or undone and tried again.

The head plans with what it knows of every node, and asks each node of the plan to hold its bundles. When all have said
yes they are committed; if one refuses, dies, or does not answer in time, all are given back and the group waits on. So
a group has all its bundles or holds nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from hpcray.base.bundle_names import group_of
from hpcray.base.ids import node_of, owner_of, raylet_of
from hpcray.core.effects import Effect, Send
from hpcray.core.gcs import notes
from hpcray.core.gcs.groups import Group, GroupTexts
from hpcray.core.gcs.notes import Notes
from hpcray.core.scheduler.placement import ClusterView
from hpcray.core.scheduler.planning import Plan
from hpcray.core.scheduler.seeking import Seeker
from hpcray.core.scheduler.telling import REPORT_AFTER
from hpcray.core.scheduler.wants import ACTOR_KLASS
from hpcray.wire import messages as m

CREATED, RESCHEDULING, REMOVED = "CREATED", "RESCHEDULING", "REMOVED"
ANSWER_WITHIN = 10.0
"""Nodes that have not answered by then are asked to forget it, and the group is tried again."""
TRIED_AT_ONCE = 16
"""So many waiting groups are looked at when a node has more room; all are with every tick."""
REMOVED_KEPT, IDS_KEPT = 1000, 100_000
STARVING_AFTER = 2.0
"""A group that has waited for this long has nodes keep room for it, one group at a time: smaller requests that come
again and again must not starve it."""
FIRST_PATIENCE, LONGEST_PATIENCE = 8.0, 64.0
"""For so long they do; doubles with each try. In between the others run for as long: what is waited for may itself
depend on them."""
RETRY_PAUSE = 0.05
"""In a large cluster, groups that wait are looked at once in this time, however many nodes report more room."""
LARGE = 64


class PlacementGroups:
    """Registers, places, moves and removes groups.

    Attributes:
        on_removed: told, by its id in hex, that a group is removed.
        notes: which rows have changed, for the journal.
    """

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self.notes = Notes()
        self._seeker = Seeker(view)
        self._texts = GroupTexts(view)
        self._retried = float("-inf")
        self._groups: dict[bytes, Group] = {}
        self._waiting: OrderedDict[bytes, Group] = OrderedDict()
        self._attempts: dict[bytes, Group] = {}
        self._names: dict[tuple[str, str], bytes] = {}
        self._owned: dict[bytes, set[bytes]] = {}
        self._early: dict[bytes, set[bytes]] = {}
        self._kept: deque[bytes] = deque()
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._dead: OrderedDict[bytes, None] = OrderedDict()
        self.on_removed: Callable[[float, str, list[Effect]], None] = lambda now, group, out: None

    # ------------------------------------------------------------ conversation with processes

    def create(self, now: float, src: bytes, msg: m.CreateGroup) -> list[Effect]:
        """Register a group and try to place it."""
        spec, out = msg.spec, list[Effect]()
        name = (spec.namespace, spec.name)
        if spec.group in self._groups:  # asked again, of another head
            self._groups[spec.group].watchers.add(src)
            return [Send(src, m.GcsReply(msg.req, True, b"")), *self.watch(src, m.WatchGroup(spec.group))]
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
        self.notes.add(notes.GROUP, spec.group)
        self.notes.add(notes.GROUP_WATCH, spec.group + src)
        self._index(group)
        if group.key in self._gone or (spec.owner and self._is_dead(spec.owner)):
            self._end(now, group, "it was removed before it was known, or its owner is gone", out)
        else:
            self._waiting[spec.group] = group
            self._try(now, group, out)
        return out

    def watch(self, src: bytes, msg: m.WatchGroup) -> list[Effect]:
        """Tell the state, now and at each change."""
        group = self._groups.get(msg.group)
        self.notes.add(notes.GROUP_WATCH, msg.group + src)
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
            self._give_up(now, group, {node}, out)
            self._try(now, group, out)
            return out, []
        if group.awaited:
            return out, []
        return out, self._commit(group, out)

    def node_died(self, now: float, node: int) -> list[Effect]:
        """Bundles that were there get another place; attempts that count on it are undone."""
        out: list[Effect] = []
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
        if not everything and len(self._view.nodes) > LARGE and now - self._retried < RETRY_PAUSE:
            return
        self._retried = now
        self._seeker.forget_failures()
        idle = [group for group in self._waiting.values() if not group.chosen]
        for group in idle if everything else idle[:TRIED_AT_ONCE]:
            self._try(now, group, out)

    def tick(self, now: float) -> list[Effect]:
        """Retry; undo what nobody answers; say why somebody waits."""
        out: list[Effect] = []
        self._seeker.forget_failures()
        for group in list(self._attempts.values()):
            if now - group.asked_at > ANSWER_WITHIN + group.queued:
                group.avoid |= group.awaited
                self._give_up(now, group, set(), out)
            elif group.queued and self._seeker.find(group) is not None:
                self._undo(group, set(), out)  # there is room now elsewhere
        for group in self._waiting.values():
            group.avoid.clear()
        self.retry(now, out, everything=True)
        self._keep_room(now, out)
        for group in self._waiting.values():
            if now - group.told >= REPORT_AFTER and not group.warned:
                group.warned = True
                self._tell_creator(group, self._texts.why_waiting(group), True, out)
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
        group = group_of(shape.resources)
        return bool(group) and self.removed(group)

    def named(self, name: str, namespace: str) -> Group | None:
        """The group with this name."""
        ident = self._names.get((namespace, name))
        return None if ident is None else self._groups[ident]

    def find(self, group: bytes) -> Group | None:
        """The group with this id, also for a while after it was removed."""
        return self._groups.get(group)

    def forgotten(self, group: str) -> bool:
        """Whether the group with this id (in hex) is removed, or was before it was known."""
        return group in self._gone

    def gone_ids(self) -> list[str]:
        """Groups that are no more, in hex, the oldest first."""
        return list(self._gone)

    def early(self) -> dict[bytes, set[bytes]]:
        """Groups that are not known yet, and who waits for them."""
        return self._early

    def all(self) -> list[Group]:
        """Every group, the last removed ones included."""
        return list(self._groups.values())

    # ------------------------------------------------------------ inside

    def _index(self, group: Group) -> None:
        if group.spec.name:
            self._names[group.spec.namespace, group.spec.name] = group.spec.group
        if group.spec.owner:
            self._owned.setdefault(group.spec.owner, set()).add(group.spec.group)

    def _try(self, now: float, group: Group, out: list[Effect]) -> None:
        """Plan with what is free now and ask the nodes, unless there is no room."""
        chosen = self._seeker.find(group)
        if chosen is not None:
            self._ask(now, group, chosen, 0.0, out)
        elif self._view.nodes and not group.warned and not self._seeker.possible(group):
            group.warned = True
            self._tell_creator(group, self._texts.why_never(group), False, out)

    def _keep_room(self, now: float, out: list[Effect]) -> None:
        """Have nodes keep room for the group that has starved for longest, even though they have none now."""
        if any(group.queued for group in self._attempts.values()):
            return
        starving = [
            group
            for group in self._waiting.values()
            if not group.chosen and now - group.since >= STARVING_AFTER and now >= group.rests_until
        ]
        starving.sort(key=lambda group: (group.patience, group.since))
        for group in starving[:TRIED_AT_ONCE]:
            chosen = self._seeker.find_reachable(group)
            if chosen is not None:
                self._ask(now, group, chosen, group.patience or FIRST_PATIENCE, out)
                return

    def _ask(self, now: float, group: Group, chosen: Plan, patience: float, out: list[Effect]) -> None:
        """Ask the nodes of a plan to hold the bundles.

        Args:
            patience: how long they may wait for room, in seconds.
        """
        group.chosen = chosen
        group.attempt += 1
        group.asked_at = now
        group.queued = patience
        group.awaited = set(chosen.values())
        self._attempts[group.spec.group] = group
        for index, node in chosen.items() if not patience else ():
            self._view.take(node, tuple(group.spec.bundles[index].items()))
        alone = len(group.awaited) == 1 and not patience
        for node in sorted(group.awaited):
            msg = m.PrepareBundles(group.spec.group, group.attempt, group.here(node), alone, patience)
            out.append(Send(raylet_of(node), msg))

    def _give_up(self, now: float, group: Group, without: set[int], out: list[Effect]) -> None:
        """An attempt has failed; one that had nodes keep room for it lets the others run before the next."""
        if group.queued:
            group.rests_until = now + group.queued
            group.patience = min(LONGEST_PATIENCE, 2 * group.queued)
        self._undo(group, without, out)

    def _undo(self, group: Group, without: set[int], out: list[Effect]) -> None:
        """Take an attempt back: nodes forget it, but for those that hold nothing."""
        for node in sorted(set(group.chosen.values()) - without):
            indices = list(group.here(node))
            out.append(Send(raylet_of(node), m.ReturnBundles(group.spec.group, indices, "it was not completed")))
        group.chosen = {}
        group.awaited = set()
        group.queued = 0.0
        self._attempts.pop(group.spec.group, None)

    def _commit(self, group: Group, out: list[Effect]) -> list[int]:
        nodes = sorted(set(group.chosen.values()))
        for node in nodes if len(nodes) > 1 or group.queued else ():
            out.append(Send(raylet_of(node), m.CommitBundles(group.spec.group)))
        for index, node in group.chosen.items():
            group.nodes[index] = node
            self._view.bundle_came(node, group.key, index, group.spec.bundles[index])
        group.chosen = {}
        group.queued = group.patience = group.rests_until = 0.0
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
        for proc in group.watchers if self.notes.on else ():
            self.notes.add(notes.GROUP_WATCH, ident + proc)
        group.watchers.clear()
        self._kept.append(ident)
        self._forget_id(group.key)
        if len(self._kept) > REMOVED_KEPT:
            forgotten = self._kept.popleft()
            self._groups.pop(forgotten, None)
            self.notes.add(notes.GROUP, forgotten)
        self.on_removed(now, group.key, out)

    def _forget_id(self, group: str) -> None:
        self._gone[group] = None
        self.notes.add(notes.GONE, bytes.fromhex(group))
        if len(self._gone) > IDS_KEPT:
            self.notes.add(notes.GONE, bytes.fromhex(self._gone.popitem(last=False)[0]))

    def _owner_died(self, now: float, owner: bytes, out: list[Effect]) -> None:
        for ident in list(self._owned.get(owner, ())):
            self._end(now, self._groups[ident], "the owner of its placement group is gone", out)

    def _is_dead(self, proc: bytes) -> bool:
        return proc in self._dead or node_of(proc) in self._view.dead

    def _set_state(self, group: Group, state: str, reason: str, out: list[Effect]) -> None:
        group.state, group.reason = state, reason
        self.notes.add(notes.GROUP, group.spec.group)
        out.extend(Send(proc, m.GroupState(group.spec.group, state, reason)) for proc in sorted(group.watchers))

    def _tell_creator(self, group: Group, text: str, waits: bool, out: list[Effect]) -> None:
        out.append(Send(owner_of(group.spec.group), m.Infeasible(ACTOR_KLASS, text, waits)))
