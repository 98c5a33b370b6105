"""Actors and placement groups that a head takes over from another one, and what it does where the nodes know better.

A raylet that hears of a new head says what it holds (`Held`), after all it had said to the old one that is not in the
journal. So what is missing there is gone, and what is there and not in the journal was begun in the old head's last
moment: its creation comes again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hpcray.base.ids import raylet_of
from hpcray.core.effects import Effect, Send
from hpcray.core.gcs import notes
from hpcray.core.gcs.actor import ALIVE, DEAD, RESTARTING, Actor
from hpcray.core.gcs.actors import ActorTable
from hpcray.core.gcs.groups import Group
from hpcray.core.gcs.placement_groups import CREATED, REMOVED, RESCHEDULING, PlacementGroups
from hpcray.core.scheduler.placement import ClusterView
from hpcray.wire import messages as m

_NOT_HERE = "its worker ended while another node became the head"
_UNKNOWN = "the head died before it had noted it"


class AdoptingActors(ActorTable):
    """An actor table that can begin with what another one knew."""

    def __init__(self, view: ClusterView) -> None:
        super().__init__(view)
        self._found: dict[bytes, int] = {}

    def adopt(self, actor: Actor) -> None:
        """Take in an actor that another head has had."""
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
            self._view.take_soft(actor.node, actor.soft)
        elif actor.complete:
            self._wait(actor)
        if not actor.complete:
            self._incomplete.add(spec.actor)

    def reconcile(self, now: float, held: Mapping[int, m.Held], gone: Mapping[tuple[int, bytes], m.ActorGone]) -> (
        list[Effect]
    ):  # fmt: skip
        """Compare with what nodes have.

        Args:
            held: what each node has said. gone: by node and actor, what they have said of actors that ended there.
        """
        out: list[Effect] = []
        here = {
            (actor, node): (worker, restarts) for node, said in held.items() for actor, worker, restarts in said.actors
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
                self._found[ident] = node
            elif known.state == DEAD or known.node != node:
                out.append(Send(raylet_of(node), m.KillActor(ident, True, known.reason or _UNKNOWN)))
            elif known.state == ALIVE and known.out_of_scope:
                out.append(Send(known.worker, m.TerminateActor(ident)))
        return out

    def end_unknown(self) -> list[Effect]:
        """All that was said to the old head has come: what nobody knows is not wanted."""
        found, self._found = self._found, {}
        return [Send(raylet_of(node), m.KillActor(ident, True, _UNKNOWN)) for ident, node in found.items()]

    def _moved(self, actor: Actor, node: int, restarts: int, out: list[Effect]) -> None:
        """The old head had sent it to another place than was written down last, or to the same one again."""
        self._unwait(actor)
        if actor.node >= 0:
            self._view.give_soft(actor.node, actor.soft)
        if actor.state == ALIVE:
            actor.former.append(actor.worker)
            actor.state, actor.worker, actor.reason = RESTARTING, b"", _NOT_HERE
        actor.restarts = max(actor.restarts, restarts)
        self._is_at(actor, node)
        self._tell(actor, out)

    def _missing(self, now: float, actor: Actor, gone: m.ActorGone | None, out: list[Effect]) -> None:
        if gone is not None:
            out += self.gone(now, actor.node, gone)
        elif actor.state == ALIVE:
            actor.former.append(actor.worker)
            self._lost(now, actor, _NOT_HERE, False, out)
        else:
            self._view.give_soft(actor.node, actor.soft)
            actor.node = -1
            self._place(now, actor, out)

    def _is_at(self, actor: Actor, node: int) -> None:
        actor.node = node
        self._view.take_soft(node, actor.soft)
        self.notes.add(notes.ACTOR, actor.spec.actor)

    def _place(self, now: float, actor: Actor, out: list[Effect]) -> bool:
        node = self._found.pop(actor.spec.actor, None) if self._found else None
        if node is None or node not in self._view.nodes:
            return super()._place(now, actor, out)
        self._is_at(actor, node)
        return True


class AdoptingGroups(PlacementGroups):
    """Placement groups likewise."""

    def adopt(self, group: Group) -> None:
        """Take in a group that another head has had. It may have all its bundles, some of them or none."""
        ident = group.spec.group
        self._groups[ident] = group
        if group.state == REMOVED:
            self._kept.append(ident)
            return
        self._index(group)
        for index, node in enumerate(group.nodes):
            if node >= 0 and node in self._view.nodes:
                self._view.bundle_came(node, group.key, index, group.spec.bundles[index])
        if group.state != CREATED:
            self._waiting[ident] = group

    def recall(self, gone: Iterable[str], dead: Iterable[bytes]) -> None:
        """What another head knew to be over: groups (ids in hex), processes."""
        self._gone.update(dict.fromkeys(gone))
        self._dead.update(dict.fromkeys(dead))

    def reconcile(self, now: float, held: Mapping[int, m.Held]) -> list[Effect]:
        """Compare with the bundles that nodes have."""
        out: list[Effect] = []
        here = {node: {(ident, index) for ident, index, _ in said.bundles} for node, said in held.items()}
        for group in self._groups.values():
            missing = {
                node
                for index, node in enumerate(group.nodes)
                if group.state != REMOVED and node in here and (group.spec.group, index) not in here[node]
            }
            for node in sorted(missing):
                self._lose(now, group, node, out)
        for node, said in held.items():
            for ident, index, usable in said.bundles:
                known = self._groups.get(ident)
                if known is None or known.state == REMOVED or known.nodes[index] != node:
                    out.append(Send(raylet_of(node), m.ReturnBundles(ident, [index], "it was not completed")))
                elif not usable:
                    out.append(Send(raylet_of(node), m.CommitBundles(ident)))
        return out

    def _lose(self, now: float, group: Group, node: int, out: list[Effect]) -> None:
        """A node lacks a bundle: it gives back the others of the group, too, and all of them get another place."""
        indices = [index for index, at in enumerate(group.nodes) if at == node]
        out.append(Send(raylet_of(node), m.ReturnBundles(group.spec.group, indices, "one of its bundles was lost")))
        group.nodes = [-1 if at == node else at for at in group.nodes]
        self._view.bundles_left(node, group.key)
        group.since = group.told = now
        self._set_state(group, RESCHEDULING, f"node {node} has lost it", out)
        self._waiting.setdefault(group.spec.group, group)
