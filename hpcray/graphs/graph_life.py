"""A compiled graph from its start to its end, apart from the values in it."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from hpcray.common.exceptions import RayActorError, RayChannelError
from hpcray.common.ids import HEAD
from hpcray.graphs.channel_memory import ChannelMemory
from hpcray.graphs.channels import Party, PartyChannels, wire
from hpcray.graphs.compiled_graphs import CloseGraph, CompiledGraphs, OpenGraph
from hpcray.graphs.execution_loop import ActorPart, join_graph, leave_graph, make_memory, run_loop
from hpcray.graphs.graph_plan import DRIVER, GraphPlan
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.actor_submitter import GRAPHS_GROUP
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.runtime.core_worker.object_refs import ObjectRef

logger = logging.getLogger("ray")


class GraphLife:
    """The actors' loops, the memory of this node, and what ended them. It does not refer to the `CompiledDAG`.

    Args:
        slots: how many executions may be under way. capacity: bytes of a slot of a channel.

    Attributes:
        loops: the refs of the loops, by actor's number; they are ready when the graph has ended.
    """

    def __init__(self, process: CoreWorker, ident: bytes, plan: GraphPlan, slots: int, capacity: int) -> None:
        self.process, self.ident, self.plan = process, ident, plan
        self.loops: list[ObjectRef[Any]] = []
        self._failed: ObjectRef[Any] | None = None
        self._memory: ChannelMemory | None = None
        self._parties: dict[int, Party] = {}
        self._graph: OpenGraph = CompiledGraphs.of(process).open(ident, process.me, self._on_close)
        try:
            self.channels = self._start(slots, capacity)
        except BaseException:
            self._undo()
            raise
        for loop in self.loops:
            process.when_available(loop, lambda value, error, loop=loop: self._loop_ended(loop))  # type: ignore[misc]

    def _call(self, actor: int, group: str, function: Any, *args: Any) -> Any:
        method = self.plan.actors[actor].__ray_call__
        options = {"max_task_retries": 0, **({"concurrency_group": group} if group else {})}
        return method.options(**options).remote(function, *args)

    def _start(self, slots: int, capacity: int) -> PartyChannels:
        process, plan = self.process, self.plan
        joining = [self._call(actor, "", join_graph, self.ident, process.me) for actor in range(len(plan.actors))]
        self._parties = dict(enumerate(process.get(joining, None)))
        self._parties[DRIVER] = Party(process.me, process.node, os.getpid())
        wiring = wire(plan, self._parties, slots, capacity)
        shapes = {party: wiring.shapes.get(where.node, []) for party, where in self._parties.items()}
        places: dict[int, tuple[int, int, int]] = {}
        for party, where in sorted(self._parties.items()):  # this process comes first
            if where.node in places or not shapes[party]:
                continue
            if party == DRIVER:
                self._memory = ChannelMemory.create(shapes[party], process.config.spin)
                places[where.node] = self._memory.file.place
            else:
                places[where.node] = process.get_one(
                    self._call(party, "", make_memory, self.ident, shapes[party]), None
                )
        for actor, tasks in enumerate(plan.tasks):
            place = places.get(self._parties[actor].node)
            part = ActorPart(self.ident, place, shapes[actor], wiring.ends[actor], tasks, slots)
            self.loops.append(self._call(actor, GRAPHS_GROUP, run_loop, part))
        return PartyChannels(process, self.ident, self._graph, wiring.ends[DRIVER], self._memory, shapes[DRIVER], slots)

    def _undo(self) -> None:
        self.end()
        for actor in range(len(self.plan.actors)) if not self.loops and not self.process.engine.closed else ():
            self._call(actor, "", leave_graph, self.ident)

    # ------------------------------------------------------------ the end

    @property
    def closed(self) -> bool:
        """True once the graph has ended."""
        return self._graph.closed

    def _on_close(self) -> None:
        if self._memory is not None:
            self._memory.close()

    def _loop_ended(self, loop: ObjectRef[Any]) -> None:
        if not self._graph.closed:
            self._failed = loop
            self.end()

    def end(self) -> None:
        """End the loops, as soon as they wait for a value or for room. From any thread, and from destructors."""
        engine = self.process.engine
        if self._graph.closed:
            return
        if engine.holds_lock():  # a destructor that interrupts the engine
            engine.call_soon(self.end)
            return
        with engine.lock:
            self._graph.close()
            graphs = CompiledGraphs.of(self.process)
            graphs.forget(self.ident)
            if engine.closed:
                return
            # Also those of this node, which the memory's end wakes, may wait for messages.
            others = {party.proc for party in self._parties.values()} - {self.process.me}
            graphs.send_all(others, CloseGraph(self.ident))
            engine.flush()

    def wait(self, timeout: float, kill: bool) -> None:
        """Wait until the loops have ended, then kill the actors if wanted."""
        process = self.process
        if process.engine.closed or not self.loops:
            return
        deadline = time.monotonic() + timeout
        for actor, loop in zip(self.plan.actors, self.loops, strict=True):
            ready, _ = process.wait([loop], 1, max(0.0, deadline - time.monotonic()), False)
            if not ready:
                logger.warning(
                    "Compiled DAG actor %s is still running %ss after teardown().%s",
                    actor, timeout, "" if kill else " Call teardown with kill_actors=True if force kill is desired.",
                )  # fmt: skip
        if kill:
            with process.engine.lock:
                for actor in self.plan.actors:
                    process.submitter.actors.client(actor).kill()
                    process.engine.send(HEAD, m.KillActor(actor._actor, True, "its compiled graph was torn down."))
                process.engine.flush()

    def raise_reason(self) -> None:
        """Raise what ended the graph: the death of an actor, or a teardown."""
        if self._failed is not None and not self.process.engine.closed:
            self.process.get_one(self._failed, None)
        raise RayChannelError("Channel closed.")

    def raise_closed(self) -> None:
        """Raise RayChannelError, as Ray does where a graph that has ended is executed. Its cause says why it ended."""
        try:
            self.raise_reason()
        except RayActorError as reason:
            raise RayChannelError("Channel closed.") from reason
