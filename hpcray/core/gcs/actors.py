"""All actors of the job: where each is, who watches it, and what happens when it dies."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import msgspec

from hpcray.base.bundle_names import bundle_of
from hpcray.base.ids import node_of, owner_of, raylet_of, show_proc
from hpcray.core.effects import Effect, Send
from hpcray.core.gcs import notes
from hpcray.core.gcs.actor import ALIVE, DEAD, RESTARTING, Actor
from hpcray.core.gcs.early import Early, EarlyQuestions, unknown
from hpcray.core.gcs.notes import Notes
from hpcray.core.scheduler.placement import ClusterView
from hpcray.core.scheduler.wants import ACTOR_KLASS, node_affinity
from hpcray.wire import messages as m

PARK_AFTER = 0.5
"""An actor that found no room for this long queues at a busy node."""
STAY_PARKED = 30.0
"""It comes back to the same one for this long, and longer where that keeps room for it."""
LONGEST_PAUSE = 8.0
DEAD_KEPT = 10_000
"""So many dead actors are remembered, for those who ask what became of them."""


class ActorTable:
    """Registers, places, restarts and ends actors.

    Attributes:
        early: questions about actors that are not registered yet.
        notes: which rows have changed, for the journal.
    """

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self.notes = Notes()
        self.actors: dict[bytes, Actor] = {}
        self.names: dict[tuple[str, str], bytes] = {}
        self._owned: dict[bytes, set[bytes]] = {}
        self._homeless: dict[tuple[m.Shape, m.Shape], OrderedDict[bytes, Actor]] = {}
        self._dead: deque[bytes] = deque()
        self.early = EarlyQuestions()
        self._incomplete: set[bytes] = set()
        self._parked_last = -1

    # ------------------------------------------------------------ conversation with processes

    def create(self, now: float, src: bytes, msg: m.CreateActor) -> list[Effect]:
        """Register and place an actor; answered before it is placed."""
        spec = msg.spec
        name = (spec.namespace, spec.name)
        known = self.actors.get(spec.actor)
        if known is not None:
            return [Send(src, m.GcsReply(msg.req, True, b"")), *self._completed(now, known, msg)]
        if spec.name and self.named(spec.name, spec.namespace) is not None:
            text = (
                f"name_taken: The name {spec.name} (namespace={spec.namespace}) is already taken. Please use a "
                f"different name or get the existing actor using ray.get_actor('{spec.name}', "
                f"namespace='{spec.namespace}'). hint: get_if_exists=True does either"
            )
            return [Send(src, m.GcsReply(msg.req, False, text.encode()))]
        out: list[Effect] = [Send(src, m.GcsReply(msg.req, True, b""))]
        actor = self.actors[spec.actor] = Actor(spec, complete=msg.ready, since=now, watchers={src})
        if spec.name:
            self.names[name] = spec.actor
        if not spec.detached:
            self._owned.setdefault(actor.owner, set()).add(spec.actor)
        self.notes.add(notes.SPEC, spec.actor)
        self.notes.add(notes.ACTOR, spec.actor)
        self.notes.add(notes.WATCH, spec.actor + src)
        early = self.early.take(spec.actor)
        if early is not None:
            actor.watchers |= early.watchers
        if early is not None and early.killed:
            self.notes.add(notes.KILLED, spec.actor)
            self._end(actor, early.killed, out)
        elif msg.ready:
            self._place(now, actor, out)
        else:
            self._incomplete.add(spec.actor)
        return out

    def _completed(self, now: float, actor: Actor, msg: m.CreateActor) -> list[Effect]:
        out: list[Effect] = []
        if msg.ready and not actor.complete and actor.state != DEAD:
            actor.spec, actor.complete, actor.since = msg.spec, True, now
            self.notes.add(notes.SPEC, msg.spec.actor)
            self._incomplete.discard(msg.spec.actor)
            self._place(now, actor, out)
        return out

    def watch(self, src: bytes, msg: m.WatchActor) -> list[Effect]:
        """Tell the state, now and at each change."""
        actor = self.actors.get(msg.actor)
        self.notes.add(notes.WATCH, msg.actor + src)
        if actor is None:
            if self.early.may_come(msg.actor):
                self.early.of(msg.actor).watchers.add(src)
                return []
            return [Send(src, unknown(msg.actor))]
        if actor.state != DEAD:
            actor.watchers.add(src)
        return [Send(src, self._state_of(actor))]

    def kill(self, now: float, msg: m.KillActor) -> list[Effect]:
        """End it now, for good or to be restarted."""
        out: list[Effect] = []
        actor = self.actors.get(msg.actor)
        if actor is None and msg.no_restart and self.early.may_come(msg.actor):
            self.early.of(msg.actor).killed = msg.reason or "it was killed"
            self.notes.add(notes.KILLED, msg.actor)
        if actor is None or actor.state == DEAD:
            return out
        if msg.no_restart:
            self._end(actor, msg.reason or "it was killed", out)
        elif actor.node >= 0:
            out.append(Send(raylet_of(actor.node), msg))
        return out

    def out_of_scope(self, msg: m.ActorOutOfScope) -> list[Effect]:
        """The last handle is gone: it ends when its queued calls are done; at once if it has no place yet."""
        out: list[Effect] = []
        actor = self.actors.get(msg.actor)
        if actor is None or actor.state == DEAD:
            return out
        actor.out_of_scope = True
        self.notes.add(notes.ACTOR, msg.actor)
        if actor.node < 0:
            self._end(actor, "all handles to it are gone", out)
        elif actor.state == ALIVE:
            out.append(Send(actor.worker, m.TerminateActor(msg.actor)))
        return out

    def ready(self, now: float, src: bytes, msg: m.ActorReady) -> list[Effect]:
        """The worker `src` ran the constructor."""
        actor = self.actors.get(msg.actor)
        if actor is None or actor.state == DEAD or actor.node != node_of(src) or src in actor.former:
            return [Send(src, m.Exit(0))]
        out: list[Effect] = []
        if actor.state == ALIVE:
            return out
        actor.worker = src
        if msg.error:
            actor.error = msg.error
            out.append(Send(src, m.Exit(0)))
            self._dies(actor, f"the constructor of {actor.title()} raised an exception", out)
            return out
        actor.state = ALIVE
        actor.refusals = 0
        self._tell(actor, out)
        if actor.out_of_scope:
            out.append(Send(src, m.TerminateActor(msg.actor)))
        return out

    # ------------------------------------------------------------ conversation with raylets

    def refused(self, now: float, node: int, msg: m.StartActorRefused) -> list[Effect]:
        """The node has no room, or could not start a worker (then the reason says why)."""
        out: list[Effect] = []
        actor = self.actors.get(msg.actor)
        if actor is None or actor.node != node or actor.state in (ALIVE, DEAD):
            return out
        self._view.give_soft(node, actor.soft)
        actor.node = -1
        actor.since = now
        if msg.reason:
            actor.refusals += 1
            actor.retry_at = now + min(LONGEST_PAUSE, 0.5 * 2**actor.refusals)
            self._wait(actor)
            self._warn(actor, f"{actor.title()} waits: {msg.reason}", out)
            return out
        state = self._view.nodes.get(node)
        if state is not None:
            state.shunned.add(actor.spec.hold.resources)
        self._place(now, actor, out)
        return out

    def gone(self, now: float, node: int, msg: m.ActorGone) -> list[Effect]:
        """Its worker is dead: restart it, if it has restarts left and did not end on purpose."""
        out: list[Effect] = []
        actor = self.actors.get(msg.actor)
        if actor is None or actor.state == DEAD or actor.node != node:
            return out
        if (actor.worker and actor.worker != msg.worker) or msg.worker in actor.former:
            return out
        actor.former.append(msg.worker)
        state = self._view.nodes.get(node)
        host = f" (host {state.info.host})" if state is not None and not msg.intended else ""
        self._lost(now, actor, f"{msg.reason}{host}", msg.intended, out)
        return out

    def node_died(self, now: float, node: int, reason: str) -> list[Effect]:
        """What was there restarts elsewhere or is dead; what was only on its way there goes elsewhere."""
        out: list[Effect] = []
        for owner in [owner for owner in self._owned if node_of(owner) == node]:
            self._owner_died(owner, f"node {node} died: {reason}", out)
        self._creators_died({owner_of(ident) for ident in self._incomplete if node_of(ident) == node}, out)
        self._never_come(self.early.node_died(node), out)
        for actor in list(self.actors.values()):
            actor.watchers = {proc for proc in actor.watchers if node_of(proc) != node}
            if actor.node != node or actor.state == DEAD:
                continue
            if actor.state == ALIVE:
                self._lost(now, actor, f"node {node} died: {reason}", False, out)
            else:
                actor.node = -1
                self._place(now, actor, out)
        return out

    def process_died(self, proc: bytes, reason: str) -> list[Effect]:
        """A process is gone: it watches nothing any more, and its actors end unless they are detached."""
        out: list[Effect] = []
        for actor in self.actors.values():
            actor.watchers.discard(proc)
        self._owner_died(proc, f"{show_proc(proc)} died: {reason}", out)
        self._creators_died({proc}, out)
        self._never_come(self.early.creator_died(proc), out)
        return out

    def _never_come(self, waited_for: list[tuple[bytes, Early]], out: list[Effect]) -> None:
        for actor, early in waited_for:
            out.extend(Send(watcher, unknown(actor)) for watcher in early.watchers)

    def retry(self, now: float, out: list[Effect]) -> None:
        """Place what waits, as far as it fits now."""
        for (place, _), group in list(self._homeless.items()):
            feasible = bool(self._view.feasible(place))
            for actor in list(group.values()):
                known = feasible or actor.warned
                if actor.retry_at <= now and not self._place(now, actor, out) and known:
                    break

    def tick(self, now: float, out: list[Effect]) -> None:
        """Retry; queue at busy nodes what has waited for long."""
        self.retry(now, out)
        for group in list(self._homeless.values()):
            for actor in list(group.values()):
                if now - actor.since >= PARK_AFTER and actor.retry_at <= now:
                    self._park(now, actor, out)

    # ------------------------------------------------------------ questions

    def named(self, name: str, namespace: str) -> Actor | None:
        """The living actor with this name."""
        ident = self.names.get((namespace, name))
        return None if ident is None or self.actors[ident].out_of_scope else self.actors[ident]

    def rows(self) -> list[dict[str, Any]]:
        """One row per actor for state listings."""
        return [
            {
                "actor": a.spec.actor, "class_name": a.spec.class_name, "state": a.state, "name": a.spec.name,
                "namespace": a.spec.namespace, "detached": a.spec.detached, "node": a.node, "worker": a.worker,
                "restarts": a.restarts, "reason": a.reason, "owner": a.owner,
            }
            for a in self.actors.values()
        ]  # fmt: skip

    def waiting(self) -> list[Actor]:
        """Actors that have no place yet."""
        return [actor for group in self._homeless.values() for actor in group.values()]

    # ------------------------------------------------------------ inside

    def _place(self, now: float, actor: Actor, out: list[Effect]) -> bool:
        """Send the actor to a node with room; else it waits. Whether it was sent."""
        spec = actor.spec
        feasible = self._view.feasible(spec.place)
        affinity = node_affinity(spec.place.strategy)
        if not feasible:
            self._wait(actor)
            if self._view.nodes and bundle_of(spec.place.resources) is None:
                self._warn(actor, self._view.why_infeasible(spec.place, actor.title()), out)
            return False
        if affinity is not None and feasible == [affinity[0]]:
            self._start(actor, affinity[0], spec, out)
            return True
        node = self._view.choose_for_actor(spec.place, spec.hold)
        if node is None:
            self._wait(actor)
            return False
        self._start(actor, node, spec, out)
        return True

    def _park(self, now: float, actor: Actor, out: list[Effect]) -> None:
        """Queue at a busy node: the one where it queued before, which is kept free for it for longer with each try."""
        node = actor.parked
        if now - actor.parked_at >= STAY_PARKED or node not in self._view.nodes:
            nodes = self._view.servers(actor.spec.place, actor.spec.hold)
            if not nodes:
                return
            node = next((n for n in nodes if n > self._parked_last), nodes[0])
            self._parked_last = actor.parked = node
            actor.parked_at = now
        place = msgspec.structs.replace(actor.spec.place, strategy=f"node:{node}")
        self._start(actor, node, msgspec.structs.replace(actor.spec, place=place), out)

    def _start(self, actor: Actor, node: int, spec: m.ActorSpec, out: list[Effect]) -> None:
        self._unwait(actor)
        self.notes.add(notes.ACTOR, spec.actor)
        actor.node = node
        self._view.take_soft(node, actor.soft)
        out.append(Send(raylet_of(node), m.StartActor(spec, actor.restarts)))

    def _lost(self, now: float, actor: Actor, reason: str, intended: bool, out: list[Effect]) -> None:
        limit = actor.spec.max_restarts
        if intended or actor.out_of_scope or 0 <= limit <= actor.restarts:
            self._dies(actor, reason, out)
            return
        self._view.give_soft(actor.node, actor.soft)
        actor.node = -1
        actor.worker = b""
        actor.restarts += 1
        actor.state = RESTARTING
        actor.reason = reason
        actor.since = now
        self._tell(actor, out)
        self._place(now, actor, out)

    def _end(self, actor: Actor, reason: str, out: list[Effect]) -> None:
        """Dead by decision: its raylet kills what runs."""
        if actor.node >= 0:
            out.append(Send(raylet_of(actor.node), m.KillActor(actor.spec.actor, True, reason)))
        self._dies(actor, reason, out)

    def _dies(self, actor: Actor, reason: str, out: list[Effect]) -> None:
        spec = actor.spec
        self._unwait(actor)
        self._incomplete.discard(spec.actor)
        if actor.node >= 0:
            self._view.give_soft(actor.node, actor.soft)
        actor.state = DEAD
        actor.reason = reason
        if spec.name and self.names.get((spec.namespace, spec.name)) == spec.actor:
            del self.names[spec.namespace, spec.name]
        mine = self._owned.get(actor.owner)
        if mine is not None:
            mine.discard(spec.actor)
            if not mine:
                del self._owned[actor.owner]
        self._tell(actor, out)
        for proc in actor.watchers if self.notes.on else ():
            self.notes.add(notes.WATCH, spec.actor + proc)
        actor.watchers.clear()
        actor.spec = msgspec.structs.replace(spec, cls=b"", args=b"", refs=[])
        self.notes.add(notes.SPEC, spec.actor)
        self._dead.append(spec.actor)
        if len(self._dead) > DEAD_KEPT:
            forgotten = self._dead.popleft()
            del self.actors[forgotten]
            for earlier in self.early.forget(forgotten):
                self.notes.add(notes.FORGOTTEN, earlier)
            for table in (notes.SPEC, notes.ACTOR, notes.FORGOTTEN):
                self.notes.add(table, forgotten)

    def _owner_died(self, owner: bytes, reason: str, out: list[Effect]) -> None:
        for ident in list(self._owned.get(owner, ())):
            self._end(self.actors[ident], f"its owner is gone ({reason})", out)

    def _creators_died(self, creators: set[bytes], out: list[Effect]) -> None:
        """Detached actors too: nobody is left to send the arguments of their constructors."""
        for ident in [ident for ident in self._incomplete if owner_of(ident) in creators]:
            self._end(self.actors[ident], "its creator died before the arguments of its constructor were ready", out)

    def _warn(self, actor: Actor, reason: str, out: list[Effect]) -> None:
        if not actor.warned:
            actor.warned = True
            out.append(Send(actor.owner, m.Infeasible(ACTOR_KLASS, reason)))

    def _wait(self, actor: Actor) -> None:
        self.notes.add(notes.ACTOR, actor.spec.actor)
        group = self._homeless.setdefault((actor.spec.place, actor.spec.hold), OrderedDict())
        group.setdefault(actor.spec.actor, actor)

    def _unwait(self, actor: Actor) -> None:
        key = (actor.spec.place, actor.spec.hold)
        group = self._homeless.get(key)
        if group is not None and group.pop(actor.spec.actor, None) is not None and not group:
            del self._homeless[key]

    def _state_of(self, actor: Actor) -> m.ActorState:
        return m.ActorState(actor.spec.actor, actor.state, actor.worker, actor.restarts, actor.reason, actor.error)

    def _tell(self, actor: Actor, out: list[Effect]) -> None:
        self.notes.add(notes.ACTOR, actor.spec.actor)
        state = self._state_of(actor)
        out.extend(Send(proc, state) for proc in sorted(actor.watchers))
