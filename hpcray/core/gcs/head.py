"""The head: GCS and cluster scheduler in one core, events in, effects out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcray.base.config import Config
from hpcray.base.ids import node_of, raylet_of
from hpcray.core.effects import Effect, Send
from hpcray.core.gcs import notes
from hpcray.core.gcs.adopting import AdoptingGroups
from hpcray.core.gcs.journal import Journal, Replica, Tables
from hpcray.core.gcs.queries import Queries
from hpcray.core.gcs.refusing import RefusingActors
from hpcray.core.gcs.restoring import Cores, Members, fill
from hpcray.core.gcs.resuming import Resumed, resume, waits_for_the_past
from hpcray.core.gcs.waiting import WaitingActors
from hpcray.core.scheduler.cluster import ClusterScheduler
from hpcray.core.scheduler.nodes import joined
from hpcray.core.scheduler.placement import ClusterView
from hpcray.wire import messages as m

HANDLES: tuple[type, ...] = (
    m.CreateActor, m.WatchActor, m.KillActor, m.ActorReady, m.ActorGone, m.ActorOutOfScope, m.StartActorRefused,
    m.GcsCall, m.Unmet, m.GrantRefused, m.NodeView, m.SetJob,
    m.CreateGroup, m.WatchGroup, m.RemoveGroup, m.BundlesPrepared,
)  # fmt: skip
"""Message types for `HeadCore.handle`. In the head's raylet KillActor and SetJob are for the head core, unless their
source is the head itself."""


class HeadCore:
    """GCS + cluster scheduler: actors, names, key-value, queries, unmet demand.

    Attributes:
        journal: of all that must not be lost with this process; see `gcs.restoring`.
        earlier: what an earlier run of the job has left; some of it comes back when the program has said what it is:
            workers import from where it does.
        resumed: what that was.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.session = ""
        self.job: m.JobInfo | None = None
        self.earlier: Replica | None = None
        self.resumed: Resumed | None = None
        self._asked_early: list[tuple[bytes, m.Message]] = []
        self._view = ClusterView()
        self._scheduler = ClusterScheduler(self._view)
        self._actors = self.actors = RefusingActors(self._view)
        self._waiting = WaitingActors(self._view, self._actors)
        self._groups = AdoptingGroups(self._view)
        self._groups.on_removed = self._group_removed
        self._scheduler.group_removed = self._groups.removed
        self._scheduler.locality_wait = config.locality_wait
        self._actors.group_gone = self._groups.gone
        self._queries = Queries(self._view, self._scheduler, self._actors, self._groups)
        self.journal = Journal(Tables(self, self._view, self._actors, self._groups, self._queries))
        self._notes = self.journal.notes
        self._early_views: dict[int, m.NodeView] = {}
        self._handlers: dict[type, Callable[[float, bytes, Any], list[Effect]]] = {
            m.CreateActor: self._actors.create,
            m.WatchActor: lambda now, src, msg: self._actors.watch(src, msg),
            m.KillActor: lambda now, src, msg: self._actors.kill(now, msg),
            m.ActorReady: self._actors.ready,
            m.ActorGone: lambda now, src, msg: self._actors.gone(now, node_of(src), msg),
            m.ActorOutOfScope: lambda now, src, msg: self._actors.out_of_scope(msg),
            m.StartActorRefused: lambda now, src, msg: self._actors.refused(now, node_of(src), msg),
            m.GcsCall: lambda now, src, msg: [Send(src, self._queries.answer_once(src, msg))],
            m.Unmet: lambda now, src, msg: self._scheduler.unmet(now, msg),
            m.GrantRefused: lambda now, src, msg: self._scheduler.refused(now, node_of(src), msg),
            m.NodeView: self._node_view,
            m.SetJob: self._set_job,
            m.CreateGroup: self._groups.create,
            m.WatchGroup: lambda now, src, msg: self._groups.watch(src, msg),
            m.RemoveGroup: lambda now, src, msg: self._groups.remove(now, msg),
            m.BundlesPrepared: self._bundles_prepared,
        }

    def cluster_up(self, now: float, session: str, nodes: list[m.NodeInfo]) -> list[Effect]:
        """Every node is in: place what waited for that."""
        self.session = session
        known = {info.index: info for info in (*self._queries.infos, *nodes)}
        self._queries.infos = [known[index] for index in sorted(known)]
        self._view.up(nodes)
        self._notes.add(notes.SESSION, b"")
        for info in nodes:
            self._notes.add(notes.NODE, info.index.to_bytes(2, "big"))
        for view in self._early_views.values():
            self._view.update(view)
        self._early_views.clear()
        out = self._scheduler.cluster_changed(now)
        self._actors.retry(now, out)
        self._groups.retry(now, out, everything=True)
        return out

    def restore(self, now: float, replica: Replica) -> Members:
        """Become, before anything else, what another head was; then tell it who has died since."""
        who = fill(self._cores(), now, replica)
        self.session, self.job = who.session, who.job
        return who

    def _cores(self) -> Cores:
        return Cores(self._view, self._actors, self._groups, self._queries)

    def handle(self, now: float, src: bytes, msg: m.Message) -> list[Effect]:
        """Any message in `HANDLES`.

        Raises:
            KeyError: the message type is not for this core.
        """
        if self.earlier is not None and waits_for_the_past(msg):
            self._asked_early.append((src, msg))
            return []
        return self._handlers[type(msg)](now, src, msg)

    def node_died(self, now: float, node: int, reason: str) -> list[Effect]:
        """A node is gone, with everything on it."""
        self._view.lost(node, reason)
        self._notes.add(notes.NODE, node.to_bytes(2, "big"))
        groups = self._groups.node_died(now, node)
        return groups + self._scheduler.node_died(now, node) + self._actors.node_died(now, node, reason)

    def process_died(self, now: float, proc: bytes, reason: str) -> list[Effect]:
        """Any process of the cluster is gone (the raylet of its node says so)."""
        self._notes.add(notes.ENDED, proc)
        self._queries.answers.forget(proc)
        groups = self._groups.process_died(now, proc)
        return groups + self._scheduler.holder_died(proc, reason) + self._actors.process_died(proc, reason)

    def tick(self, now: float) -> list[Effect]:
        """Housekeeping, every `config.tick`."""
        out = self._groups.tick(now)
        out += self._scheduler.tick(now)
        self._waiting.tick(now, out)  # first: the table sends who waits to queue at a busy node
        self._actors.tick(now, out)
        return out

    def _node_view(self, now: float, src: bytes, msg: m.NodeView) -> list[Effect]:
        if not self._queries.infos:
            self._early_views[msg.node] = joined(self._early_views.get(msg.node), msg)
            return []
        if not self._view.update(msg):
            return []
        out = self._scheduler.node_grew(now, msg.node)
        self._actors.retry(now, out)
        self._groups.retry(now, out)
        return out

    def _bundles_prepared(self, now: float, src: bytes, msg: m.BundlesPrepared) -> list[Effect]:
        out, nodes = self._groups.prepared(now, node_of(src), msg)
        for node in nodes:
            out += self._scheduler.node_grew(now, node)
        if nodes:
            self._actors.retry(now, out)
        return out

    def _group_removed(self, now: float, group: str, out: list[Effect]) -> None:
        self._scheduler.tell_removed(group, out)
        self._actors.end_in_group(now, group, out)

    def _set_job(self, now: float, src: bytes, msg: m.SetJob) -> list[Effect]:
        self.job = msg.job
        self._notes.add(notes.SESSION, b"")
        out: list[Effect] = [Send(raylet_of(node), msg) for node in sorted(self._view.nodes)]
        if self.earlier is not None:
            self.resumed = resume(self._cores(), now, self.earlier)
            self.earlier = None
            self._actors.retry(now, out)
            self._groups.retry(now, out, everything=True)
            for asker, question in self._asked_early:
                out += self.handle(now, asker, question)
            self._asked_early.clear()
        return out
