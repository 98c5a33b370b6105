"""All actors of the job: where each one is, who watches it, and what happens when its worker, node or owner dies."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from hpcray.common.ids import node_of, owner_of, raylet_of, run_of, show_proc
from hpcray.common.labels import ACTOR_SCHEDULING_CLASS, UNSCHEDULABLE, fails_when_busy, names_nodes, node_affinity
from hpcray.common.resources import REPORT_AFTER, Resources, group_of, plain, to_amounts
from hpcray.core.effects import Effect, Send
from hpcray.core.gcs import state_log as rows
from hpcray.core.gcs.cluster_resources import REFUSED_AT_ONCE, ClusterResources
from hpcray.core.gcs.state_log import DirtyRows
from hpcray.protocol import messages as m
from hpcray.protocol.messages import ActorStateUpdate

# ------------------------------------------------------------ pending actor lookups
# Questions about actors that are not registered yet, and what is known of actors that will never come.


ENDED_KEPT = 100_000
"""Forgotten actors, and dead processes, that are remembered; a question about an earlier one waits for ever."""


class PendingLookup(msgspec.Struct):
    """Messages about one actor that came ahead of its registration.

    Attributes:
        watchers: processes that wait for its state.
        killed: why it is to die as soon as it is registered, or "".
    """

    watchers: set[bytes] = msgspec.field(default_factory=set)
    killed: str = ""


class PendingActorLookups:
    """Lookups of actors that are not registered yet, and what is known of actors that will never come.

    A handle can reach a process before the actor is registered: the creator's CreateActor takes another way, and waits
    for the constructor's arguments. A lookup is pending until the actor is registered or its creator is dead.

    Attributes:
        pending: by actor id.
        dead_creators: processes that will register nothing more.
        run: of this job; a handle that was kept from another run (in a pickle) is of an actor that will never come.
        forgotten: the last actors that were dead and have left the table.
    """

    def __init__(self) -> None:
        self.pending: dict[bytes, PendingLookup] = {}
        self.dead_creators: dict[bytes, None] = {}
        self.run = 0
        self._dead_nodes: set[int] = set()
        self.forgotten: dict[bytes, None] = {}

    def may_come(self, actor: bytes) -> bool:
        """Whether an actor that is not in the table can still be registered."""
        creator = owner_of(actor)
        ended = actor in self.forgotten or creator in self.dead_creators or node_of(creator) in self._dead_nodes
        return not ended and run_of(creator) == self.run

    def lookup_of(self, actor: bytes) -> PendingLookup:
        """The lookup of an actor that may come; made if there is none."""
        return self.pending.setdefault(actor, PendingLookup())

    def restore_ended(self, forgotten: Iterable[bytes], creators: Iterable[bytes], nodes: Iterable[int]) -> None:
        """Take in actors, processes and nodes that another head knew to be over."""
        for actor in forgotten:
            self.forget_actor(actor)
        self.dead_creators.update(dict.fromkeys(creators))
        self._dead_nodes.update(nodes)

    def forget_actor(self, actor: bytes) -> list[bytes]:
        """A dead actor leaves the table and will not come again. Returns the ids that are dropped here in turn."""
        self.forgotten[actor] = None
        if len(self.forgotten) <= ENDED_KEPT:
            return []
        oldest = next(iter(self.forgotten))
        del self.forgotten[oldest]
        return [oldest]

    def creator_died(self, proc: bytes) -> list[tuple[bytes, PendingLookup]]:
        """The process will register nothing more. Returns the lookups that waited for its actors."""
        if len(self.dead_creators) >= ENDED_KEPT:
            del self.dead_creators[next(iter(self.dead_creators))]
        self.dead_creators[proc] = None
        for lookup in self.pending.values():
            lookup.watchers.discard(proc)
        return [(actor, self.pending.pop(actor)) for actor in list(self.pending) if owner_of(actor) == proc]

    def node_died(self, node: int) -> list[tuple[bytes, PendingLookup]]:
        """No process of the node will register anything more. Returns the lookups that waited for their actors."""
        self._dead_nodes.add(node)
        for lookup in self.pending.values():
            lookup.watchers = {proc for proc in lookup.watchers if node_of(proc) != node}
        return [(actor, self.pending.pop(actor)) for actor in list(self.pending) if node_of(actor) == node]


def unknown_actor(actor: bytes) -> ActorStateUpdate:
    """The answer about an actor that will never be registered."""
    reason = "it is not known in this job. It might be dead or it's from a different cluster"
    return ActorStateUpdate(actor, "DEAD", b"", 0, reason, b"")


def killed_unregistered(actor: bytes, lookup: PendingLookup) -> ActorStateUpdate:
    """The state of an actor that was killed and whose creator has not registered it yet."""
    return ActorStateUpdate(actor, "DEAD", b"", 0, lookup.killed, b"")


# ------------------------------------------------------------ actor manager


PENDING, ALIVE, RESTARTING, DEAD = "PENDING", "ALIVE", "RESTARTING", "DEAD"
TRANSITIONS: dict[str, tuple[str, ...]] = {
    # Registered; waits for constructor arguments, for a node, or for its worker to run the constructor.
    PENDING: (ALIVE, RESTARTING, DEAD),
    # The constructor has returned; calls run.
    ALIVE: (RESTARTING, DEAD),
    # The worker or node has died and restarts are left; waits for a node or for the constructor.
    RESTARTING: (ALIVE, RESTARTING, DEAD),
    # Ended for good; `Config.dead_actors` of these stay in the table.
    DEAD: (),
}
BUSY_NODE_AFTER = 0.5
"""Seconds without room after which an actor queues at a busy node."""
BUSY_NODE_KEPT = 30.0
"""Seconds during which an actor that queues again goes to the same busy node, which reserves room longer each time."""
LONGEST_PAUSE = 8.0
"""Seconds between two attempts to start an actor whose worker cannot be started, at most."""
FORMER_WORKERS_KEPT = 16
"""Former workers of one actor whose late messages are recognized."""
_ENDED_MEANWHILE = "its worker ended while another node became the head"
_NOT_REGISTERED = "the head died before it had noted it"
_NEVER_RAN = "\nThe actor never ran - it was cancelled before it started running."
_GROUP_REMOVED = "its placement group was removed"

Admission = Callable[[float, m.ActorSpec], "tuple[str, bytes] | None"]
"""Given the time and an actor: why the actor is not started, and the pickled error of its calls. None: it may start."""


class Actor(msgspec.Struct, eq=False):
    """One actor.

    Attributes:
        node: where it was sent, -1 while it waits for a node.
        worker: its process, known once it is ALIVE. pid, ip: where that is, or was.
        repr_name: how its object calls itself, "" where its class has no repr of its own.
        unavailable: it was ALIVE and restarts, for it was lost: calls that run at most once fail meanwhile.
        moves: how many of its restarts were because its node left: these do not count towards max_restarts.
        complete: False while its creator waits for the constructor's arguments; until then it has only a name.
        since: when it began to wait for a node; when a DEAD one died, 0 where another head has seen that.
        started: when it was ALIVE for the first time, 0 where another head has seen that.
        refusals, retry_at: how often a node could not start a worker for it; not tried again before that time.
        reported: whether its owner has been sent a report of what it waits for.
        queued_at_busy_node, queued_there_since: the busy node where it queued last (-1: none), and since when.
        former_workers: workers that ran it before; messages from and about these are stale.
        sent_at: when it was sent to a node last.
        soft: what it is placed by but does not hold (a default actor is placed by one CPU and holds none).
    """

    spec: m.ActorSpec
    state: str = PENDING
    node: int = -1
    worker: bytes = b""
    pid: int = 0
    ip: str = ""
    repr_name: str = ""
    unavailable: bool = False
    restarts: int = 0
    moves: int = 0
    reason: str = ""
    error: bytes = b""
    watchers: set[bytes] = msgspec.field(default_factory=set)
    out_of_scope: bool = False
    complete: bool = True
    since: float = 0.0
    started: float = 0.0
    refusals: int = 0
    retry_at: float = 0.0
    reported: bool = False
    queued_at_busy_node: int = -1
    queued_there_since: float = 0.0
    former_workers: deque[bytes] = msgspec.field(default_factory=lambda: deque(maxlen=FORMER_WORKERS_KEPT))
    sent_at: float = float("-inf")
    soft: Resources = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        hold = dict(self.spec.hold.resources)
        place = self.spec.place.resources
        self.soft = {name: units - hold.get(name, 0) for name, units in place if units > hold.get(name, 0)}

    @property
    def owner(self) -> bytes:
        return owner_of(self.spec.actor)

    def title(self) -> str:
        name = f" {self.spec.name!r}" if self.spec.name else ""
        return f"actor {self.spec.class_name}{name}"


class ActorManager:
    """Registers, places, restarts and ends actors.

    Args:
        resources: what every node has; actors are placed by it.
        dirty_rows: where changed rows are noted for the state log.
        is_removed: whether a shape asks for resources of a removed placement group.
        most_dead: how many DEAD actors stay in the table.

    Attributes:
        actors: by actor id; the last DEAD ones included.
        names: ids of named actors that are not DEAD, by namespace and name.
        pending_lookups: questions about actors that are not registered yet.
    """

    def __init__(
        self, resources: ClusterResources, dirty_rows: DirtyRows, is_removed: Callable[[m.Shape], bool], most_dead: int
    ) -> None:
        self._resources = resources
        self._dirty_rows = dirty_rows
        self._group_is_removed = is_removed
        self._most_dead = most_dead
        self.admissions: list[Admission] = []
        self.actors: dict[bytes, Actor] = {}
        self.names: dict[tuple[str, str], bytes] = {}
        self.pending_lookups = PendingActorLookups()
        self._owned: dict[bytes, set[bytes]] = {}
        self._without_node: dict[tuple[m.Shape, m.Shape], OrderedDict[bytes, Actor]] = {}
        self._waiting_since: dict[bytes, float] = {}
        self._dead: deque[bytes] = deque()
        self._incomplete: set[bytes] = set()
        self._unregistered: dict[bytes, int] = {}
        self._last_busy_node = -1

    # ------------------------------------------------------------ messages of processes

    def register_actor(self, now: float, src: bytes, msg: m.CreateActor) -> list[Effect]:
        """Register an actor and place it. The reply does not wait for the placement."""
        spec = msg.spec
        known = self.actors.get(spec.actor)
        if known is not None:
            return [Send(src, m.GcsReply(msg.req, True, b"")), *self._complete(now, known, msg)]
        if spec.name and self.find_by_name(spec.name, spec.namespace) is not None:
            text = (
                f"name_taken: The name {spec.name} (namespace={spec.namespace}) is already taken. Please use a "
                f"different name or get the existing actor using ray.get_actor('{spec.name}', "
                f"namespace='{spec.namespace}'). hint: get_if_exists=True does either"
            )
            return [Send(src, m.GcsReply(msg.req, False, text.encode()))]
        out: list[Effect] = [Send(src, m.GcsReply(msg.req, True, b""))]
        actor = self.actors[spec.actor] = Actor(spec, complete=msg.ready, since=now, watchers={src})
        if spec.name:
            self.names[spec.namespace, spec.name] = spec.actor
        if not spec.detached:
            self._owned.setdefault(actor.owner, set()).add(spec.actor)
        self._dirty_rows.add(rows.SPEC, spec.actor)
        self._dirty_rows.add(rows.ACTOR, spec.actor)
        self._dirty_rows.add(rows.WATCH, spec.actor + src)
        lookup = self.pending_lookups.pending.pop(spec.actor, None)
        if lookup is not None:
            actor.watchers |= lookup.watchers
        if lookup is not None and lookup.killed:
            self._dirty_rows.add(rows.KILLED, spec.actor)
            self._end(now, actor, lookup.killed, out)
        elif msg.ready:
            self._place(now, actor, out)
        else:
            self._incomplete.add(spec.actor)
        return out

    def _complete(self, now: float, actor: Actor, msg: m.CreateActor) -> list[Effect]:
        out: list[Effect] = []
        if msg.ready and not actor.complete and actor.state != DEAD:
            actor.spec, actor.complete, actor.since = msg.spec, True, now
            self._dirty_rows.add(rows.SPEC, msg.spec.actor)
            self._incomplete.discard(msg.spec.actor)
            self._place(now, actor, out)
        return out

    def watch_actor(self, src: bytes, msg: m.WatchActor) -> list[Effect]:
        """Send the actor's state to `src`, now and at each change."""
        actor = self.actors.get(msg.actor)
        self._dirty_rows.add(rows.WATCH, msg.actor + src)
        if actor is None:
            if self.pending_lookups.may_come(msg.actor):
                lookup = self.pending_lookups.lookup_of(msg.actor)
                lookup.watchers.add(src)
                return [Send(src, killed_unregistered(msg.actor, lookup))] if lookup.killed else []
            return [Send(src, unknown_actor(msg.actor))]
        if actor.state != DEAD:
            actor.watchers.add(src)
        return [Send(src, self._state_message(actor))]

    def kill_actor(self, now: float, msg: m.KillActor) -> list[Effect]:
        """End the actor's worker now; with `no_restart` for good."""
        out: list[Effect] = []
        actor = self.actors.get(msg.actor)
        if actor is None and msg.no_restart and self.pending_lookups.may_come(msg.actor):
            lookup = self.pending_lookups.lookup_of(msg.actor)
            lookup.killed = (msg.reason or "it was killed") + _NEVER_RAN
            self._dirty_rows.add(rows.KILLED, msg.actor)
            # It is registered when the constructor's arguments are there, perhaps never: calls must not wait so long.
            dead = killed_unregistered(msg.actor, lookup)
            out.extend(Send(proc, dead) for proc in sorted({*lookup.watchers, owner_of(msg.actor)}))
        if actor is None or actor.state == DEAD:
            return out
        if msg.no_restart:
            never = _NEVER_RAN if actor.state == PENDING else ""
            self._end(now, actor, (msg.reason or "it was killed") + never, out)
        elif actor.node >= 0:
            out.append(Send(raylet_of(actor.node), msg))
        return out

    def actor_out_of_scope(self, now: float, msg: m.ActorOutOfScope) -> list[Effect]:
        """The last handle is gone: the actor ends when its queued calls are done, at once if it has no node yet."""
        out: list[Effect] = []
        actor = self.actors.get(msg.actor)
        if actor is None or actor.state == DEAD:
            return out
        actor.out_of_scope = True
        self._dirty_rows.add(rows.ACTOR, msg.actor)
        if actor.node < 0:
            self._end(now, actor, "all references to the actor were removed", out)
        elif actor.state == ALIVE:
            out.append(Send(actor.worker, m.TerminateActor(msg.actor)))
        return out

    def actor_ready(self, now: float, src: bytes, msg: m.ActorReady) -> list[Effect]:
        """The worker `src` has run the constructor."""
        actor = self.actors.get(msg.actor)
        if actor is None or actor.state == DEAD or actor.node != node_of(src) or src in actor.former_workers:
            return [Send(src, m.Exit(0))]
        out: list[Effect] = []
        if actor.state == ALIVE:
            return out
        actor.worker, actor.pid, actor.repr_name = src, msg.pid, msg.repr_name
        state = self._resources.nodes.get(actor.node)
        actor.ip = state.info.address if state is not None else ""
        if msg.error:
            actor.error = msg.error
            out.append(Send(src, m.Exit(0)))
            self._dies(now, actor, f"the constructor of {actor.title()} raised an exception", out)
            return out
        self._set_state(actor, ALIVE)
        actor.started = actor.started or now
        actor.unavailable = False
        actor.refusals = 0
        self._publish(actor, out)
        if actor.out_of_scope:
            out.append(Send(src, m.TerminateActor(msg.actor)))
        return out

    # ------------------------------------------------------------ messages of raylets

    def start_refused(self, now: float, node: int, msg: m.StartActorRefused) -> list[Effect]:
        """The node has no room, or could not start a worker (then the message has a reason)."""
        out: list[Effect] = []
        actor = self.actors.get(msg.actor)
        if actor is None or actor.node != node or actor.state in (ALIVE, DEAD):
            return out
        self._resources.give_soft(node, actor.soft)
        actor.node = -1
        actor.since = now
        if msg.reason:
            actor.refusals += 1
            actor.retry_at = now + min(LONGEST_PAUSE, 0.5 * 2**actor.refusals)
            self._add_waiting(actor)
            self._report(actor, f"{actor.title()} waits: {msg.reason}", out)
            return out
        self._resources.rejected(node, actor.spec.hold)
        affinity = node_affinity(actor.spec.place.strategy)
        if affinity is not None and affinity[0] == node and now - actor.sent_at < REFUSED_AT_ONCE:
            self._add_waiting(actor)  # until the next tick
        else:
            self._place(now, actor, out)
        return out

    def actor_gone(self, now: float, node: int, msg: m.ActorGone) -> list[Effect]:
        """The actor's worker is dead: restart the actor if restarts are left and it did not end on purpose."""
        out: list[Effect] = []
        actor = self.actors.get(msg.actor)
        if actor is None or actor.state == DEAD or actor.node != node:
            return out
        if (actor.worker and actor.worker != msg.worker) or msg.worker in actor.former_workers:
            return out
        actor.former_workers.append(msg.worker)
        state = self._resources.nodes.get(node)
        host = f" (host {state.info.host})" if state is not None and not msg.intended else ""
        self._lost(now, actor, f"{msg.reason}{host}", msg.intended, out)
        return out

    def node_died(self, now: float, node: int, reason: str, left: bool) -> list[Effect]:
        """Restart or end the actors that ran on the node; place those elsewhere that were on their way to it.

        Args:
            left: it was about to leave: its actors move, and calls wait for them.
        """
        out: list[Effect] = []
        for owner in [owner for owner in self._owned if node_of(owner) == node]:
            self._owner_died(now, owner, f"node {node} died: {reason}", out)
        self._creators_died(now, {owner_of(ident) for ident in self._incomplete if node_of(ident) == node}, out)
        self._answer_lookups(self.pending_lookups.node_died(node), out)
        for actor in list(self.actors.values()):
            actor.watchers = {proc for proc in actor.watchers if node_of(proc) != node}
            if actor.node != node or actor.state == DEAD:
                continue
            if actor.state == ALIVE:
                self._lost(now, actor, f"its node has died: node {node} died: {reason}", False, out, moves=left)
            else:
                actor.node = -1
                self._place(now, actor, out)
        return out

    def process_died(self, now: float, proc: bytes, reason: str) -> list[Effect]:
        """A process is gone: it watches nothing any more, and the actors it owns end unless they are detached."""
        out: list[Effect] = []
        for actor in self.actors.values():
            actor.watchers.discard(proc)
        self._owner_died(now, proc, f"{show_proc(proc)} died: {reason}", out)
        self._creators_died(now, {proc}, out)
        self._answer_lookups(self.pending_lookups.creator_died(proc), out)
        return out

    def _answer_lookups(self, lookups: list[tuple[bytes, PendingLookup]], out: list[Effect]) -> None:
        for actor, lookup in lookups:
            for watcher in sorted(lookup.watchers):
                self._dirty_rows.add(rows.WATCH, actor + watcher)
                out.append(Send(watcher, unknown_actor(actor)))

    def place_waiting(self, now: float, out: list[Effect]) -> None:
        """Place the actors that wait for a node, as far as there is room now."""
        for (place, _), group in list(self._without_node.items()):
            feasible = bool(self._resources.feasible(place))
            for actor in list(group.values()):
                known = feasible or actor.reported
                if actor.retry_at <= now and not self._place(now, actor, out) and known:
                    break

    def tick(self, now: float, out: list[Effect]) -> None:
        """Report long waits, place what waits, and queue at busy nodes what has waited for BUSY_NODE_AFTER."""
        self._report_long_waits(now, out)  # first: below, waiting actors are sent to busy nodes
        self.place_waiting(now, out)
        for group in list(self._without_node.values()):
            for actor in list(group.values()):
                if now - actor.since >= BUSY_NODE_AFTER and actor.retry_at <= now:
                    self._queue_at_busy_node(now, actor, out)

    # ------------------------------------------------------------ the end of a job, and of a placement group

    def recheck_waiting(self, now: float) -> list[Effect]:
        """Place the waiting actors again: those that the admission now refuses end."""
        out: list[Effect] = []
        for actor in self.waiting_actors():
            self._place(now, actor, out)
        return out

    def end_waiting_in_group(self, now: float, group: str, out: list[Effect]) -> None:
        """A placement group (its id in hex) is removed: end the actors that wait for room in it."""
        for actor in self.waiting_actors():
            if group_of(actor.spec.place.resources) == group:
                self._place(now, actor, out)

    def find_by_name(self, name: str, namespace: str) -> Actor | None:
        """The actor with this name, unless it is DEAD or out of scope."""
        ident = self.names.get((namespace, name))
        return None if ident is None or self.actors[ident].out_of_scope else self.actors[ident]

    def actor_rows(self, now: float = 0.0) -> list[dict[str, Any]]:
        """One row per actor for state listings. started_for, dead_for: seconds since it started, or died; None: not
        known."""
        return [
            {
                "actor": a.spec.actor, "class_name": a.spec.class_name, "state": a.state, "name": a.spec.name,
                "namespace": a.spec.namespace, "detached": a.spec.detached, "node": a.node, "worker": a.worker,
                "restarts": a.restarts, "reason": a.reason, "owner": a.owner, "repr_name": a.repr_name,
                "resources": to_amounts(plain(dict(a.spec.hold.resources))), "complete": a.complete,
                "group": group_of(a.spec.hold.resources), "failed": bool(a.error), "pid": a.pid, "ip": a.ip,
                "env": a.spec.hold.env, "started_for": now - a.started if a.started else None,
                "dead_for": max(0.0, now - a.since) if a.state == DEAD and a.since else None,
            }
            for a in self.actors.values()
        ]  # fmt: skip

    def waiting_actors(self) -> list[Actor]:
        """Actors that have no node yet."""
        return [actor for group in self._without_node.values() for actor in group.values()]

    def living_workers(self) -> dict[bytes, str]:
        """The workers of all ALIVE actors, with the actor's title for users."""
        return {actor.worker: actor.title() for actor in self.actors.values() if actor.state == ALIVE}

    # ------------------------------------------------------------ after another head, or another run

    def restore_actor(self, actor: Actor) -> None:
        """Take in an actor from the tables of another head."""
        spec = actor.spec
        self.actors[spec.actor] = actor
        if actor.state == DEAD:
            self._dead.append(spec.actor)
            return
        if spec.name and not actor.out_of_scope:
            self.names[spec.namespace, spec.name] = spec.actor
        if not spec.detached:
            self._owned.setdefault(actor.owner, set()).add(spec.actor)
        if actor.node >= 0:
            self._resources.take_soft(actor.node, actor.soft)
        elif actor.complete:
            self._add_waiting(actor)
        if not actor.complete:
            self._incomplete.add(spec.actor)

    def reconcile(
        self, now: float, held: Mapping[int, m.NodeInventory], gone: Mapping[tuple[int, bytes], m.ActorGone]
    ) -> list[Effect]:
        """Compare the restored table with what the nodes have.

        A raylet that hears of a new head lists what it holds, after everything it had sent to the old head that is not
        in the state log. So an actor that is missing there has ended, and one that is there and not in the table was
        placed in the old head's last moment: its creation is sent again.

        Args:
            held: inventory of each node.
            gone: by node and actor, messages about actors that ended there.
        """
        out: list[Effect] = []
        here = {
            (actor, node): (worker, restarts) for node, msg in held.items() for actor, worker, restarts in msg.actors
        }
        places = dict(here.keys())
        for actor in list(self.actors.values()):
            ident, node = actor.spec.actor, actor.node
            if actor.state == DEAD or not actor.complete:
                continue
            found = here.get((ident, node))
            if found is not None:
                if actor.state == ALIVE and found[1] > actor.restarts:
                    self._moved(actor, node, found[1], out)
            elif ident in places:
                self._moved(actor, places[ident], here[ident, places[ident]][1], out)
            elif node in held:
                self._missing(now, actor, gone.get((node, ident)), out)
        for ident, node in here:
            known = self.actors.get(ident)
            if known is None:
                self._unregistered[ident] = node
            elif known.state == DEAD or known.node != node:
                out.append(Send(raylet_of(node), m.KillActor(ident, True, known.reason or _NOT_REGISTERED)))
            elif known.state == ALIVE and known.out_of_scope:
                out.append(Send(known.worker, m.TerminateActor(ident)))
        return out

    def kill_unregistered(self) -> list[Effect]:
        """Everything that was sent to the old head has arrived: kill actors on nodes that no creator registered."""
        found, self._unregistered = self._unregistered, {}
        return [Send(raylet_of(node), m.KillActor(ident, True, _NOT_REGISTERED)) for ident, node in found.items()]

    def _moved(self, actor: Actor, node: int, restarts: int, out: list[Effect]) -> None:
        """The old head had sent the actor to another node than the log has, or to the same node again."""
        self._remove_waiting(actor)
        if actor.node >= 0:
            self._resources.give_soft(actor.node, actor.soft)
        if actor.state == ALIVE:
            actor.former_workers.append(actor.worker)
            self._set_state(actor, RESTARTING)
            actor.worker, actor.reason, actor.unavailable = b"", _ENDED_MEANWHILE, True
        actor.restarts = max(actor.restarts, restarts)
        self._is_at(actor, node)
        self._publish(actor, out)

    def _missing(self, now: float, actor: Actor, gone: m.ActorGone | None, out: list[Effect]) -> None:
        if gone is not None:
            out += self.actor_gone(now, actor.node, gone)
        elif actor.state == ALIVE:
            actor.former_workers.append(actor.worker)
            self._lost(now, actor, _ENDED_MEANWHILE, False, out)
        else:
            self._resources.give_soft(actor.node, actor.soft)
            actor.node = -1
            self._place(now, actor, out)

    def _is_at(self, actor: Actor, node: int) -> None:
        actor.node = node
        self._resources.take_soft(node, actor.soft)
        self._dirty_rows.add(rows.ACTOR, actor.spec.actor)

    # ------------------------------------------------------------ placement

    def _place(self, now: float, actor: Actor, out: list[Effect]) -> bool:
        """Send the actor to a node with room; else it waits, or ends if it may not start. Returns whether it was sent.

        An actor that a node has already (`reconcile`) is left there.
        """
        spec = actor.spec
        if self._group_is_removed(spec.place):
            self._dies(now, actor, _GROUP_REMOVED, out)
            return False
        for admission in self.admissions:
            refused = admission(now, spec)
            if refused is not None:
                reason, actor.error = refused
                self._dies(now, actor, reason, out)
                return False
        if self._unregistered:
            found = self._unregistered.pop(spec.actor, None)
            if found is not None and found in self._resources.nodes:
                self._is_at(actor, found)
                return True
        feasible = self._resources.feasible(spec.place)
        affinity = node_affinity(spec.place.strategy)
        if self._resources.nodes and self._is_unschedulable(spec, feasible):
            self._dies(now, actor, UNSCHEDULABLE + self._resources.why_infeasible(spec.place, actor.title()), out)
            return False
        if not feasible:
            self._add_waiting(actor)
            if self._resources.is_hopeless(spec.place):
                self._report(actor, self._resources.why_infeasible(spec.place, actor.title()), out)
            return False
        if affinity is not None and feasible == [affinity[0]]:
            self._start(now, actor, affinity[0], spec, out)
            return True
        node = self._resources.choose_for_actor(spec.place, spec.hold)
        if node is None:
            self._add_waiting(actor)
            return False
        self._start(now, actor, node, spec, out)
        return True

    def _is_unschedulable(self, spec: m.ActorSpec, feasible: list[int]) -> bool:
        strategy = spec.place.strategy
        if not feasible:
            final = names_nodes(strategy) or self._resources.node_types.known
            return final and self._resources.is_hopeless(spec.place)
        return fails_when_busy(strategy) and not self._resources.nodes[feasible[0]].fits(spec.hold)

    def _queue_at_busy_node(self, now: float, actor: Actor, out: list[Effect]) -> None:
        """Queue at a busy node: the same one for BUSY_NODE_KEPT, as it reserves room for longer with each try."""
        node = actor.queued_at_busy_node
        if now - actor.queued_there_since >= BUSY_NODE_KEPT or node not in self._resources.nodes:
            nodes = self._resources.servers(actor.spec.place, actor.spec.hold)
            if not nodes:
                return
            node = next((n for n in nodes if n > self._last_busy_node), nodes[0])
            self._last_busy_node = actor.queued_at_busy_node = node
            actor.queued_there_since = now
        place = msgspec.structs.replace(actor.spec.place, strategy=f"node:{node}")
        self._start(now, actor, node, msgspec.structs.replace(actor.spec, place=place), out)

    def _start(self, now: float, actor: Actor, node: int, spec: m.ActorSpec, out: list[Effect]) -> None:
        self._remove_waiting(actor)
        actor.sent_at = now
        self._is_at(actor, node)
        out.append(Send(raylet_of(node), m.StartActor(spec, actor.restarts)))

    def _add_waiting(self, actor: Actor) -> None:
        self._dirty_rows.add(rows.ACTOR, actor.spec.actor)
        group = self._without_node.setdefault((actor.spec.place, actor.spec.hold), OrderedDict())
        group.setdefault(actor.spec.actor, actor)

    def _remove_waiting(self, actor: Actor) -> None:
        key = (actor.spec.place, actor.spec.hold)
        group = self._without_node.get(key)
        if group is not None and group.pop(actor.spec.actor, None) is not None and not group:
            del self._without_node[key]

    def _report_long_waits(self, now: float, out: list[Effect]) -> None:
        """Send each owner once per actor why it waits; actors of one owner that ask for the same share one message."""
        late: dict[tuple[bytes, m.Shape], list[Actor]] = {}
        for actor in self.waiting_actors():
            began = self._waiting_since.setdefault(actor.spec.actor, now)
            if now - began >= REPORT_AFTER and not actor.reported:
                actor.reported = True
                late.setdefault((actor.owner, actor.spec.hold), []).append(actor)
        # An actor that was sent to a node may come back refused: it has waited all the time then.
        for ident in [ident for ident in self._waiting_since if self._waits_no_more(ident)]:
            del self._waiting_since[ident]
        for (owner, hold), actors in late.items():
            more = f" (and {len(actors) - 1} more that want the same)" if len(actors) > 1 else ""
            text = self._resources.why_waiting(hold, actors[0].title() + more)
            out.append(Send(owner, m.Infeasible(ACTOR_SCHEDULING_CLASS, text, waits=True)))

    def longest_wait(self, now: float) -> float:
        """For how many seconds an actor has waited to be placed; 0: none waits."""
        return now - min(self._waiting_since.values(), default=now)

    def _waits_no_more(self, ident: bytes) -> bool:
        actor = self.actors.get(ident)
        return actor is None or actor.state in (ALIVE, DEAD)

    def _report(self, actor: Actor, reason: str, out: list[Effect]) -> None:
        if not actor.reported:
            actor.reported = True
            out.append(Send(actor.owner, m.Infeasible(ACTOR_SCHEDULING_CLASS, reason)))

    def _lost(
        self, now: float, actor: Actor, reason: str, intended: bool, out: list[Effect], moves: bool = False
    ) -> None:
        """The actor's worker is gone: place the actor again while restarts are left."""
        limit = actor.spec.max_restarts
        used_up = 0 <= limit <= actor.restarts - actor.moves and not (moves and limit)
        if intended or actor.out_of_scope or used_up:
            self._dies(now, actor, reason, out)
            return
        self._resources.give_soft(actor.node, actor.soft)
        actor.node = -1
        actor.worker, actor.pid, actor.ip = b"", 0, ""
        actor.restarts += 1
        actor.moves += moves
        if actor.state == ALIVE:
            actor.unavailable = not moves
        self._set_state(actor, RESTARTING)
        actor.reason = reason
        actor.since = now
        self._publish(actor, out)
        self._place(now, actor, out)

    def _end(self, now: float, actor: Actor, reason: str, out: list[Effect]) -> None:
        """End the actor by decision of the GCS: its raylet kills the worker."""
        if actor.node >= 0:
            out.append(Send(raylet_of(actor.node), m.KillActor(actor.spec.actor, True, reason)))
        self._dies(now, actor, reason, out)

    def _dies(self, now: float, actor: Actor, reason: str, out: list[Effect]) -> None:
        spec = actor.spec
        self._remove_waiting(actor)
        self._incomplete.discard(spec.actor)
        if actor.node >= 0:
            self._resources.give_soft(actor.node, actor.soft)
        self._set_state(actor, DEAD)
        actor.reason, actor.unavailable, actor.since = reason, False, now
        if spec.name and self.names.get((spec.namespace, spec.name)) == spec.actor:
            del self.names[spec.namespace, spec.name]
        mine = self._owned.get(actor.owner)
        if mine is not None:
            mine.discard(spec.actor)
            if not mine:
                del self._owned[actor.owner]
        self._publish(actor, out)
        for proc in actor.watchers if self._dirty_rows.on else ():
            self._dirty_rows.add(rows.WATCH, spec.actor + proc)
        actor.watchers.clear()
        actor.spec = msgspec.structs.replace(spec, cls=b"", args=b"", refs=[])
        self._dirty_rows.add(rows.SPEC, spec.actor)
        self._dead.append(spec.actor)
        if len(self._dead) > self._most_dead:
            self._forget_dead(self._dead.popleft())

    def _forget_dead(self, ident: bytes) -> None:
        del self.actors[ident]
        for earlier in self.pending_lookups.forget_actor(ident):
            self._dirty_rows.add(rows.FORGOTTEN, earlier)
        for table in (rows.SPEC, rows.ACTOR, rows.FORGOTTEN):
            self._dirty_rows.add(table, ident)

    def _owner_died(self, now: float, owner: bytes, reason: str, out: list[Effect]) -> None:
        for ident in list(self._owned.get(owner, ())):
            self._end(now, self.actors[ident], f"its owner has died ({reason})", out)

    def _creators_died(self, now: float, creators: set[bytes], out: list[Effect]) -> None:
        """End incomplete actors, detached ones too: no process is left to send their constructors' arguments."""
        for ident in [ident for ident in self._incomplete if owner_of(ident) in creators]:
            self._end(
                now, self.actors[ident], "its creator died before the arguments of its constructor were ready", out
            )

    def _set_state(self, actor: Actor, state: str) -> None:
        assert state in TRANSITIONS[actor.state], f"{actor.title()}: {actor.state} -> {state}"
        actor.state = state

    def _state_message(self, actor: Actor) -> m.ActorStateUpdate:
        where = (actor.pid, actor.ip, actor.spec.name, actor.spec.namespace) if actor.state == DEAD else ()
        return m.ActorStateUpdate(
            actor.spec.actor, actor.state, actor.worker, actor.restarts, actor.reason, actor.error, actor.unavailable,
            *where,
        )  # fmt: skip

    def _publish(self, actor: Actor, out: list[Effect]) -> None:
        self._dirty_rows.add(rows.ACTOR, actor.spec.actor)
        state = self._state_message(actor)
        out.extend(Send(proc, state) for proc in sorted(actor.watchers))

    def check_invariants(self) -> None:
        """Check every actor, the indices, and the nodes' soft amounts."""
        for ident, actor in self.actors.items():
            assert ident == actor.spec.actor
            self.check_actor(ident)
        for (namespace, name), ident in self.names.items():
            spec = self.actors[ident].spec
            assert (spec.namespace, spec.name) == (namespace, name), f"the name {name!r} belongs to another actor"
            assert self.actors[ident].state != DEAD, f"the name {name!r} belongs to a DEAD actor"
        for key, group in self._without_node.items():
            assert group, f"an empty group of waiting actors: {key}"
            for ident, actor in group.items():
                assert self.actors.get(ident) is actor and key == (actor.spec.place, actor.spec.hold)
        for owner, idents in self._owned.items():
            assert idents, f"{show_proc(owner)} owns an empty set of actors"
            for ident in idents:
                assert self.actors[ident].state != DEAD and not self.actors[ident].spec.detached, ident.hex()
        dead = sorted(ident for ident, actor in self.actors.items() if actor.state == DEAD)
        assert sorted(self._dead) == dead and len(dead) <= self._most_dead
        assert not self.pending_lookups.pending.keys() & self.actors.keys()
        for ident, lookup in self.pending_lookups.pending.items():
            gone = {proc for proc in lookup.watchers if node_of(proc) in self._resources.dead}
            assert not gone, f"{ident.hex()} is watched from dead nodes: {gone}"
        soft: dict[int, Resources] = {}
        for actor in self.actors.values():
            if actor.state != DEAD and actor.node >= 0:
                mine = soft.setdefault(actor.node, {})
                for name, units in actor.soft.items():
                    mine[name] = mine.get(name, 0) + units
        for node, state in self._resources.nodes.items():
            known = {name: units for name, units in state.soft.items() if units}
            assert known == soft.get(node, {}), f"node {node}: soft amounts {known}, its actors' {soft.get(node)}"

    def check_actor(self, ident: bytes) -> None:
        """Check one actor, if it is in the table."""
        actor = self.actors.get(ident)
        if actor is None:
            return
        spec, where = actor.spec, f"{actor.title()} {ident.hex()} {actor.state} on node {actor.node}"
        waits = ident in self._without_node.get((spec.place, spec.hold), ())
        assert actor.state in TRANSITIONS, where
        if actor.state == DEAD:
            assert not waits and ident not in self._incomplete and not actor.watchers, where
            return
        if actor.state == ALIVE:
            assert actor.node >= 0 and node_of(actor.worker) == actor.node, where
            assert actor.worker not in actor.former_workers, f"{where}: its worker is a former one"
        assert actor.node < 0 or actor.node in self._resources.nodes, f"{where}: no such node lives"
        assert actor.complete == (ident not in self._incomplete), where
        assert waits == (actor.complete and actor.node < 0), f"{where}: waits {waits}"
        if spec.name and not actor.out_of_scope:
            assert self.names.get((spec.namespace, spec.name)) == ident, f"{where}: its name leads elsewhere"
