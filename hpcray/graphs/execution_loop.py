"""An actor's part in a compiled graph: a thread that reads, calls and writes until the graph ends.

The driver starts the functions of this module in the actors, as `__ray_call__`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import dataclass
from typing import Any

from hpcray.common.task_errors import RayTaskError
from hpcray.graphs.channel_memory import FOREVER, ChannelClosed, ChannelMemory, RingShape
from hpcray.graphs.channels import Ends, Failed, Party, PartyChannels, ValueReader, ValueWriter
from hpcray.graphs.compiled_graphs import CompiledGraphs, OpenGraph
from hpcray.graphs.graph_plan import PlannedTask, ValueOf
from hpcray.protocol.serialization import SerializationError
from hpcray.runtime.core_worker.core_worker import CoreWorker, current, need_process
from hpcray.runtime.worker.replies import task_error


@dataclass
class ActorPart:
    """The part of one actor in a graph.

    Attributes:
        place: shared memory of its node (`MappedFile.place`), and the shapes of the channels there.
        slots: how many executions may be under way.
    """

    graph: bytes
    place: tuple[int, int, int] | None
    shapes: list[RingShape]
    ends: Ends
    tasks: list[PlannedTask]
    slots: int


class _Participation:
    """A graph that this process takes part in: from `join_graph` to the end of the loop."""

    def __init__(self, process: CoreWorker, graph: bytes, driver: bytes) -> None:
        self.memory: ChannelMemory | None = None
        self.graph: OpenGraph = CompiledGraphs.of(process).open(graph, driver, self._on_close)

    def _on_close(self) -> None:
        if self.memory is not None:
            self.memory.close()


_participations: dict[bytes, _Participation] = {}
_turn = threading.Lock()
"""Held by a method that one of the actor's graphs calls: those of several graphs run one after the other."""


def join_graph(actor: Any, graph: bytes, driver: bytes) -> Party:
    """Take part in a graph from now on. Returns where this actor is."""
    process = need_process()
    _participations[graph] = _Participation(process, graph, driver)
    return Party(process.me, process.node, os.getpid())


def make_memory(actor: Any, graph: bytes, shapes: list[RingShape]) -> tuple[int, int, int]:
    """Make the shared memory of this node. Returns its place."""
    memory = _participations[graph].memory = ChannelMemory.create(shapes, need_process().config.spin)
    return memory.file.place


def leave_graph(actor: Any, graph: bytes) -> None:
    """Undo `join_graph`: the graph could not be compiled."""
    CompiledGraphs.of(need_process()).forget(graph)
    _participations.pop(graph, None)


def run_loop(actor: Any, part: ActorPart) -> Any:
    """Execute the actor's part of the graph again and again, until the graph ends."""
    assert current.worker is not None
    executor: Any = current.worker.actor
    # The loop of an async actor's calls, which this is called on, has to be free for those of other graphs.
    return _execute(actor, part) if executor.loop is None else asyncio.to_thread(_execute, actor, part)


def _execute(actor: Any, part: ActorPart) -> None:
    process = need_process()
    participation = _participations[part.graph]
    try:
        if part.place is not None and participation.memory is None:
            participation.memory = ChannelMemory.open(part.place, part.shapes, process.config.spin)
        if participation.graph.closed:
            return
        ends = PartyChannels(
            process, part.graph, participation.graph, part.ends, participation.memory, part.shapes, part.slots
        )
        loop = [_Call(actor, task, ends) for task in part.tasks]
        values: dict[int, Any] = {}
        while True:
            for call in loop:
                call.run(values)
            values.clear()
    except ChannelClosed:
        pass
    finally:
        leave_graph(actor, part.graph)


class _Call:
    """A call that each execution makes."""

    def __init__(self, actor: Any, task: PlannedTask, ends: PartyChannels) -> None:
        assert current.worker is not None
        self._executor: Any = current.worker.actor
        self._name = f"{self._executor.spec.class_name}.{task.method}"
        self._method = getattr(actor, task.method) if task.function is None else task.function
        self._args, self._kwargs = task.args, task.kwargs
        self._returns = task.returns
        self._takes: list[tuple[int, ValueReader | None]] = [
            (value, ends.readers.get(value)) for value in task.values()
        ]
        # A call with a single value, which is all that it takes, needs no list to be made.
        self._only = self._takes[0][0] if len(task.args) == 1 and not task.kwargs else None
        self._outputs: list[tuple[int, int | None, ValueWriter | None]] = [
            (value, index, ends.writers.get(value)) for value, index in task.outputs
        ]

    def run(self, values: dict[int, Any]) -> None:
        """Read what was not read yet, call, write. values: what this execution has so far."""
        failed: Failed | None = None
        for value, reader in self._takes:
            if value not in values:
                assert reader is not None
                values[value] = reader.read(FOREVER)
            if failed is None and type(values[value]) is Failed:
                failed = values[value]
        result: Any = failed
        if failed is None:
            try:
                if self._only is not None:
                    with _turn:
                        result = self._method(values[self._only])
                else:
                    args = [values[arg.node] if type(arg) is ValueOf else arg for arg in self._args]
                    with _turn:
                        result = self._method(*args, **self._kwargs)
                    del args
                if asyncio.iscoroutine(result) and self._executor.loop is not None:
                    result = asyncio.run_coroutine_threadsafe(result, self._executor.loop).result()
                if self._returns:
                    _check_returns(result, self._returns)
            except Exception as error:
                result = Failed(self._error(error))
        for value, index, writer in self._outputs:
            item = result if index is None or type(result) is Failed else result[index]
            self._put(values, value, item, writer)

    def _put(self, values: dict[int, Any], value: int, item: Any, writer: ValueWriter | None) -> None:
        values[value] = item
        if writer is None:
            return
        if type(item) is not Failed:
            try:
                writer.write(item, FOREVER)
                return
            except SerializationError as error:
                item = Failed(self._error(error))
        writer.write_error(item.error, FOREVER)

    def _error(self, error: Exception) -> RayTaskError:
        return task_error(error, self._name, self._executor.error_label())


def _check_returns(result: Any, count: int) -> None:
    """Raise ValueError, as Ray does, unless a call returned a tuple of as many values as its `num_returns` says."""
    if not isinstance(result, tuple):
        raise ValueError(f"Expected a tuple of {count} outputs, but got {type(result)}")
    if len(result) != count:
        raise ValueError(f"Expected {count} outputs, but got {len(result)} outputs")
