"""The autoscaler: what waits and what each node does come in, batch jobs to submit and to cancel and nodes to remove go
out. A further node is an *instance*: one batch job of one node.

Everything that an instance goes through is in TRANSITIONS. The batch system is asked now and then (`polled`), and each
answer has all instances of this job, by its name: so a new head, or one whose question was lost, takes over what there
is without any record of its own.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Union

from msgspec import Struct

from hpcray.autoscaler.resource_demand import Bin, NodeStatus, choose_types, pack
from hpcray.common.resources import to_amounts
from hpcray.core.gcs.node_types import NodeTypeTable
from hpcray.core.gcs.placement_group_manager import Demand

QUEUED, ALLOCATED, RAY_RUNNING = "QUEUED", "ALLOCATED", "RAY_RUNNING"
RAY_STOPPING, TERMINATING, TERMINATED = "RAY_STOPPING", "TERMINATING", "TERMINATED"
TRANSITIONS: dict[str, tuple[str, ...]] = {
    # The batch system has the job, and has not started it.
    QUEUED: (ALLOCATED, RAY_RUNNING, TERMINATING, TERMINATED),
    # The batch job runs; its node is not in the job yet.
    ALLOCATED: (RAY_RUNNING, TERMINATING, TERMINATED),
    # The node is in the job.
    RAY_RUNNING: (RAY_STOPPING, TERMINATING, TERMINATED),
    # The node was asked to leave, as it is idle.
    RAY_STOPPING: (RAY_RUNNING, TERMINATING, TERMINATED),
    # The node is gone, or is not wanted any more; the batch job is being cancelled, or ends by itself.
    TERMINATING: (TERMINATED,),
    # The batch job is over.
    TERMINATED: (),
}
"""States of an instance; the words are those of Ray's instance manager, as far as it has them."""
PENDING, RUNNING, HELD = "PENDING", "RUNNING", "HELD"
"""States of a batch job that lives. One that is held is in the queue, and will not start."""
_BY_CHOICE = ("CANCELLED",)
"""Its end was a decision of a user."""
_NO_FAILURE = ("COMPLETED", "CANCELLED", "PREEMPTED", "TIMEOUT")
UPSCALE_AT_ONCE = 5
"""Number of instances that may be on their way however small the job is; as in Ray."""
CANCEL_AFTER = 5.0
"""Seconds for which an instance in the queue must have been of no use before it is cancelled."""
YOUNG = 30.0
"""A node that dies within so many seconds counts as one that could not be started; one that lives as a success."""
JOIN_TIMEOUT = 300.0
"""Seconds that a started batch job may take until its node is in."""
END_TIMEOUT = 30.0
"""Seconds that a batch job may take to end after its node has left, before it is cancelled."""
FIRST_BACKOFF, LONGEST_BACKOFF = 10.0, 3600.0
"""Seconds without a launch of a type after its first failure; twice as long after each further one, at most."""
CANCELLED_PAUSE = 60.0
"""Seconds without a launch of a type after a user has cancelled one."""
FAILURES_SHOWN = 10
NAMES_SHOWN = 8
"""Batch jobs that are named when the job ends."""


class StartNodes(Struct, frozen=True):
    """Start `count` nodes of a type; answer with `launched` or `launch_failed`."""

    request: int
    node_type: str
    count: int


class Terminate(Struct, frozen=True):
    """Cancel these batch jobs."""

    instances: tuple[str, ...]


class RemoveIdleNode(Struct, frozen=True):
    """Have this node leave, unless it is of use; answer with `stays` where it is."""

    node: int


class Report(Struct, frozen=True):
    """A sentence for the user."""

    text: str


Action = Union[StartNodes, Terminate, RemoveIdleNode, Report]


class InstanceState(Struct, frozen=True):
    """A batch job as the batch system shows it.

    Attributes:
        node_type: from its comment.
        state: PENDING, RUNNING, HELD, or how it ended.
        detail: why it waits, or how it failed.
    """

    node_type: str
    state: str
    detail: str = ""


class Instance(Struct, eq=False):
    """One batch job of one node.

    Attributes:
        since: when it came into its state, or lost its node.
        node: its node while that is in the job, else -1. joined_at: when that came; 0: it never has.
        unused_since: since when nothing needs it.
        over: how the batch job has ended; "" while it lives.
        proven: whether its node has lived for long enough to show that nodes of the type can be started.
    """

    name: str
    node_type: str
    state: str
    since: float
    node: int = -1
    detail: str = ""
    joined_at: float = 0.0
    unused_since: float | None = None
    over: str = ""
    proven: bool = False


class _RetryState(Struct):
    """Reasons to start no node of a type now: it has failed, or its batch jobs were cancelled."""

    failures: int = 0
    until: float = 0.0
    rests_until: float = 0.0
    reported: bool = False
    unavailable: bool = False


class AutoscalerSpec(Struct, frozen=True):
    """The settings of the autoscaler.

    Attributes:
        min_nodes, max_nodes: of the whole job, the nodes included that it began with.
        idle_timeout: seconds after which a node that does nothing is given back.
        upscaling_speed: how many nodes may be on their way, as a multiple of those that there are.
    """

    min_nodes: int
    max_nodes: int
    idle_timeout: float
    upscaling_speed: float = 1.0


class Autoscaler:
    """Decides on the head. Times are monotonic seconds.

    Args:
        types: what can be started.

    Attributes:
        instances: by name, while their batch jobs are known.
    """

    def __init__(self, limits: AutoscalerSpec, types: NodeTypeTable) -> None:
        self.instances: dict[str, Instance] = {}
        self._limits = limits
        self._types = types
        self._launches: dict[int, StartNodes] = {}
        self._next_request = 1
        self._surveyed = False
        self._stopped = False
        self._backoffs: dict[str, _RetryState] = {}
        self._failures: deque[tuple[float, str, str]] = deque(maxlen=FAILURES_SHOWN)
        self._idle_since: dict[int, float] = {}
        self._floor: Sequence[Demand] = ()

    @property
    def surveyed(self) -> bool:
        """True if the batch system has been asked for what there is. Before that nothing is launched."""
        return self._surveyed

    # ------------------------------------------------------------ answers

    def launched(self, now: float, request: int, names: Sequence[str]) -> None:
        """The batch system has taken a launch, and calls the batch jobs so."""
        launch = self._launches.pop(request)
        for name in names:
            self.instances.setdefault(name, Instance(name, launch.node_type, QUEUED, now))

    def launch_failed(self, now: float, request: int, reason: str, permanent: bool = False) -> list[Action]:
        """The batch system has refused a launch. permanent: it will always refuse."""
        launch = self._launches.pop(request)
        return self._failed(now, launch.node_type, reason, permanent)

    def polled(self, now: float, rows: Mapping[str, InstanceState]) -> list[Action]:
        """The batch jobs of this job that the batch system knows, ended ones of the last minutes included."""
        out: list[Action] = []
        held: list[Instance] = []
        for name, row in rows.items():
            lives = row.state in (PENDING, RUNNING, HELD)
            if name not in self.instances and lives and row.node_type in self._types.all():
                self.instances[name] = Instance(name, row.node_type, QUEUED, now)
        for instance in list(self.instances.values()):
            found = rows.get(instance.name)
            if found is None:
                if now - instance.since > END_TIMEOUT or instance.state == TERMINATING:
                    self._batch_ended(now, instance, "GONE", out)
            elif found.state == PENDING:
                instance.detail = found.detail
            elif found.state == RUNNING:
                if instance.state == QUEUED:
                    self._set_state(now, instance, ALLOCATED)
                    instance.detail = ""
            elif found.state == HELD:
                if instance.state == QUEUED:
                    text = f"batch job {instance.name} will not start: {found.detail}"
                    out += self._failed(now, instance.node_type, text)
                    held.append(instance)
            else:
                instance.detail = found.detail
                self._batch_ended(now, instance, found.state, out)
        self._surveyed = True
        return out + self._terminate(now, held)

    def stays(self, now: float, node: int) -> None:
        """A node that was asked to leave is of use, and stays."""
        self._idle_since.pop(node, None)
        for instance in self.instances.values():
            if instance.node == node and instance.state == RAY_STOPPING:
                self._set_state(now, instance, RAY_RUNNING)

    def stop(self, now: float) -> list[Action]:
        """The job ends: launch nothing more, and cancel what waits in the queue. Nodes that are in end with the job."""
        self._stopped = True
        living = [one for one in self.instances.values() if one.state != TERMINATING and not one.over]
        waiting = [one for one in living if one.state == QUEUED]
        if not living:
            return []
        names = ", ".join(one.name for one in living[:NAMES_SHOWN]) + " …" * (len(living) > NAMES_SHOWN)
        count = f"{len(living)} node{'s' * (len(living) > 1)}"
        return [*self._terminate(now, waiting), Report(f"the job ends, and with it {count} that it has added: {names}")]

    # ------------------------------------------------------------ decisions

    def update(
        self, now: float, nodes: Sequence[NodeStatus], demands: Sequence[Demand], floor: Sequence[Demand]
    ) -> list[Action]:
        """Decide, some time after the last decision.

        Args:
            nodes: all living nodes.
            demands: what waits for resources.
            floor: what `request_resources` wants there to be room for, were the nodes empty.
        """
        out: list[Action] = []
        self._floor = floor
        self._follow_nodes(now, nodes, out)
        self._follow_instances(now, out)
        if self._stopped or not self._surveyed:
            return out
        coming = self._coming()
        now_free = {use.index: Bin(dict(use.available), use.labels) for use in nodes if not use.leaving}
        if_empty = {use.index: Bin(dict(use.total), use.labels) for use in self._keep_first(nodes)}
        bins, floor_bins = [self._bins_of(coming), self._bins_of(coming)]
        left = pack(demands, [*now_free.values(), *bins])
        floor_left = pack(floor, [*if_empty.values(), *floor_bins])
        self._launch(now, nodes, coming, left, floor_left, out)
        used = [one for one, a, b in zip(coming, bins, floor_bins, strict=True) if a.used or b.used]
        self._cancel_unused(now, nodes, coming, {one.name for one in used if one is not None}, out)
        needed = {index for index, node in [*now_free.items(), *if_empty.items()] if node.used}
        self._remove_idle(now, nodes, needed, out)
        return out

    def _coming(self) -> list[Instance | None]:
        """The instances on their way, first those that will be there first; None for launches under way."""
        states = (ALLOCATED, QUEUED)
        known = [one for one in self.instances.values() if one.state in states and not one.over]
        known.sort(key=lambda one: states.index(one.state))
        return [*known, *(None for launch in self._launches.values() for _ in range(launch.count))]

    def _bins_of(self, coming: Sequence[Instance | None]) -> list[Bin]:
        names = [one.node_type for one in coming if one is not None]
        names += [launch.node_type for launch in self._launches.values() for _ in range(launch.count)]
        types = self._types.all()
        return [Bin(dict(types[name].resources), types[name].all_labels) for name in names]

    def _keep_first(self, nodes: Sequence[NodeStatus]) -> list[NodeStatus]:
        """The nodes that stay, those first that would stay anyway."""
        staying = [use for use in nodes if not use.leaving]
        return sorted(staying, key=lambda use: (use.instance in self.instances, use.idle, use.index))

    def _launch(
        self,
        now: float,
        nodes: Sequence[NodeStatus],
        coming: Sequence[Instance | None],
        left: Sequence[Demand],
        floor_left: Sequence[Demand],
        out: list[Action],
    ) -> None:
        limits, total = self._limits, len(nodes) + len(coming)
        speed = max(UPSCALE_AT_ONCE, int(limits.upscaling_speed * len(nodes)))
        most = min(limits.max_nodes - total, speed - len(coming))
        if most <= 0:
            return
        counts = self._counts(nodes, coming)
        types = {name: node_type for name, node_type in self._types.all().items() if not self._is_held(now, name)}
        room = {
            name: most if node_type.max_workers is None else node_type.max_workers - counts[name]
            for name, node_type in types.items()
        }
        wanted = Counter[str]()
        for demands in (left, floor_left):  # one node may serve both: the floor is about empty nodes
            found = Counter(choose_types(demands, room, types, most))
            wanted |= found
        for name, node_type in types.items():
            wanted[name] = max(wanted[name], min(room[name], node_type.min_workers - counts[name]))
        if types:
            first = next(iter(types))
            wanted[first] += max(0, min(room[first] - wanted[first], limits.min_nodes - total - wanted.total()))
        leaving = {use.index for use in nodes if use.leaving}
        unexplained = {  # a user may have cancelled it: the batch system will know
            one.node_type
            for one in self.instances.values()
            if one.state == RAY_RUNNING and not one.over and (one.node < 0 or one.node in leaving)
        }
        for name, count in wanted.items():
            count = 0 if self._rests(now, name) or name in unexplained else min(count, most)
            if count > 0:
                launch = StartNodes(self._next_request, name, count)
                self._next_request += 1
                self._launches[launch.request] = launch
                most -= count
                out.append(launch)

    def _cancel_unused(
        self,
        now: float,
        nodes: Sequence[NodeStatus],
        coming: Sequence[Instance | None],
        used: set[str],
        out: list[Action],
    ) -> None:
        counts, total = self._counts(nodes, coming), len(nodes) + len(coming)
        unused: list[Instance] = []
        for one in reversed(coming):
            if one is None or one.state != QUEUED:
                continue
            least = self._types.all()[one.node_type].min_workers
            if one.name in used or total <= self._limits.min_nodes or counts[one.node_type] <= least:
                one.unused_since = None
                continue
            if one.unused_since is None:
                one.unused_since = now
            if now - one.unused_since >= CANCEL_AFTER:
                unused.append(one)
                total -= 1
                counts[one.node_type] -= 1
        out += self._terminate(now, unused)

    def _remove_idle(self, now: float, nodes: Sequence[NodeStatus], needed: set[int], out: list[Action]) -> None:
        staying = [use for use in nodes if not use.leaving]
        counts, total = self._counts(staying, ()), len(staying)
        idle = {use.index for use in staying if use.idle and use.index not in needed}
        self._idle_since = {node: self._idle_since.get(node, now) for node in idle}
        for use in reversed(staying):
            instance = self.instances.get(use.instance)
            if use.index not in idle or instance is None or instance.state != RAY_RUNNING:
                continue
            least = self._types.all()[instance.node_type].min_workers
            if total <= self._limits.min_nodes or counts[instance.node_type] <= least:
                continue
            if now - max(self._idle_since[use.index], instance.joined_at) >= self._limits.idle_timeout:
                self._set_state(now, instance, RAY_STOPPING)
                out.append(RemoveIdleNode(use.index))
                total -= 1
                counts[instance.node_type] -= 1

    def _counts(self, nodes: Sequence[NodeStatus], coming: Sequence[Instance | None]) -> Counter[str]:
        """How many nodes of each type there are or will be."""
        counts = Counter(use.node_type for use in nodes)
        counts.update(one.node_type for one in coming if one is not None)
        if coming:
            for launch in self._launches.values():
                counts[launch.node_type] += launch.count
        return counts

    # ------------------------------------------------------------ what becomes of instances

    def _follow_nodes(self, now: float, nodes: Sequence[NodeStatus], out: list[Action]) -> None:
        there = {use.instance: use for use in nodes if use.instance}
        for name, use in there.items():
            if name not in self.instances and use.node_type in self._types.all():
                self.instances[name] = Instance(name, use.node_type, QUEUED, now)
        for instance in list(self.instances.values()):
            found = there.get(instance.name)
            if found is not None:
                if instance.state in (QUEUED, ALLOCATED):
                    self._set_state(now, instance, RAY_RUNNING)
                    instance.node, instance.joined_at, instance.detail = found.index, now, ""
            elif instance.state in (RAY_RUNNING, RAY_STOPPING):
                self._node_gone(now, instance, out)

    def _node_gone(self, now: float, instance: Instance, out: list[Action]) -> None:
        """Its node has left, or is dead; its batch job shows which, as soon as it has ended."""
        if instance.state == RAY_STOPPING:
            self._set_state(now, instance, TERMINATING)
        if instance.over:
            self._judge(now, instance, out)
        elif instance.node >= 0:
            instance.node, instance.since = -1, now

    def _follow_instances(self, now: float, out: list[Action]) -> None:
        late: list[Instance] = []
        for instance in list(self.instances.values()):
            waited = now - instance.since
            if instance.node >= 0 and now - instance.joined_at >= YOUNG and not instance.proven:
                instance.proven = True
                self._succeeded(instance.node_type)
            if instance.state == ALLOCATED and waited >= JOIN_TIMEOUT:
                text = f"batch job {instance.name} has run for {JOIN_TIMEOUT:g} s, and its node is not in the job"
                out += self._failed(now, instance.node_type, text)
                late.append(instance)
            elif instance.state in (RAY_RUNNING, TERMINATING) and instance.node < 0 and waited >= END_TIMEOUT:
                late.append(instance)
        out += self._terminate(now, late)

    def _batch_ended(self, now: float, instance: Instance, state: str, out: list[Action]) -> None:
        instance.over = instance.over or state
        if instance.state in (RAY_RUNNING, RAY_STOPPING) and instance.node >= 0:
            return  # the node is still in the tables: its death is not known yet
        self._judge(now, instance, out)

    def _judge(self, now: float, instance: Instance, out: list[Action]) -> None:
        """A batch job is over, and its node gone: whose fault, or whose wish, was it?"""
        name, kind, how = instance.name, instance.node_type, instance.over
        wanted, joined = instance.state == TERMINATING, bool(instance.joined_at)
        self._set_state(now, instance, TERMINATED)
        del self.instances[name]
        if wanted:
            return
        if how in _BY_CHOICE:
            out += self._hold(now, kind, f"batch job {name} was cancelled")
        elif not joined:
            detail = f": {instance.detail}" if instance.detail else ""
            out += self._failed(now, kind, f"batch job {name} ended ({how}) before its node was in the job{detail}")
        elif now - instance.joined_at < YOUNG and how not in _NO_FAILURE:
            out += self._failed(now, kind, f"the node of batch job {name} died ({how}) soon after it had joined")

    def _terminate(self, now: float, unwanted: Iterable[Instance]) -> list[Action]:
        found = list(unwanted)
        for instance in found:
            if instance.state != TERMINATING:
                self._set_state(now, instance, TERMINATING)
            instance.since = now
        return [Terminate(tuple(one.name for one in found))] if found else []

    def _set_state(self, now: float, instance: Instance, state: str) -> None:
        assert state in TRANSITIONS[instance.state], f"instance {instance.name}: {instance.state} -> {state}"
        instance.state, instance.since = state, now

    # ------------------------------------------------------------ failures

    def _is_held(self, now: float, node_type: str) -> bool:
        backoff = self._backoffs.get(node_type)
        return backoff is not None and (backoff.unavailable or now < backoff.until)

    def _rests(self, now: float, node_type: str) -> bool:
        backoff = self._backoffs.get(node_type)
        return backoff is not None and now < backoff.rests_until

    def _succeeded(self, node_type: str) -> None:
        if (backoff := self._backoffs.get(node_type)) is not None:
            backoff.failures, backoff.reported = 0, False

    def _hold(self, now: float, node_type: str, reason: str) -> list[Action]:
        backoff = self._backoffs.setdefault(node_type, _RetryState())
        news = now >= backoff.rests_until
        backoff.rests_until = now + CANCELLED_PAUSE
        self._failures.append((now, node_type, reason))
        return [Report(f"{reason}: no further node of type {node_type} for {CANCELLED_PAUSE:g} s")] if news else []

    def _failed(self, now: float, node_type: str, reason: str, permanent: bool = False) -> list[Action]:
        """Note a failure. Those of batch jobs that were submitted together are one."""
        self._failures.append((now, node_type, reason))
        backoff = self._backoffs.setdefault(node_type, _RetryState())
        backoff.unavailable = backoff.unavailable or permanent
        if now >= backoff.until or permanent:
            pause = min(LONGEST_BACKOFF, FIRST_BACKOFF * 2.0**backoff.failures)
            backoff.failures += 1
            backoff.until = now + pause
        self._types.set_unavailable(name for name, one in self._backoffs.items() if one.unavailable)
        if backoff.reported:
            return []
        backoff.reported = True
        then = "none is started any more" if permanent else "it is tried again, each time later"
        return [Report(f"no node of type {node_type} could be started: {reason}; {then}; hint: hpcray status")]

    # ------------------------------------------------------------ for users

    def describe(self, now: float) -> dict[str, Any]:
        """Return the facts for `hpcray status`. Ages in seconds."""
        alive = Counter(one.node_type for one in self.instances.values() if one.state in (RAY_RUNNING, RAY_STOPPING))
        pending = [
            {
                "instance": one.name,
                "type": one.node_type,
                "state": one.state,
                "detail": one.detail,
                "age": now - one.since,
            }
            for one in self.instances.values()
            if one.state in (QUEUED, ALLOCATED)
        ]
        pending += [
            {"instance": "", "type": launch.node_type, "state": "REQUESTED", "detail": "", "age": 0.0}
            for launch in self._launches.values()
            for _ in range(launch.count)
        ]
        return {
            "min_nodes": self._limits.min_nodes,
            "max_nodes": self._limits.max_nodes,
            "idle_timeout": self._limits.idle_timeout,
            "active": dict(alive),
            "requested": [[to_amounts(dict(one.shape.resources)), one.count] for one in self._floor],
            "pending": pending,
            "failures": [{"type": kind, "reason": why, "age": now - when} for when, kind, why in self._failures],
            "held": {
                name: -1.0 if one.unavailable else max(one.until, one.rests_until) - now
                for name, one in self._backoffs.items()
                if self._is_held(now, name) or self._rests(now, name)
            },
        }

    def check_invariants(self) -> None:
        """Check every instance, and the limits."""
        for name, instance in self.instances.items():
            assert name == instance.name and instance.state in TRANSITIONS and instance.state != TERMINATED, instance
            assert instance.node < 0 or instance.state in (RAY_RUNNING, RAY_STOPPING), instance
            assert instance.state != RAY_STOPPING or instance.joined_at, instance
        coming = len(self._coming())
        assert coming <= max(0, self._limits.max_nodes), f"{coming} nodes are on their way"
