"""Compiled graphs, as the process that compiled them uses them."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
import weakref
from queue import SimpleQueue
from typing import Any

from hpcray.common.exceptions import RayActorError, RayCgraphCapacityExceeded, RayChannelError, RayChannelTimeoutError
from hpcray.common.ids import HEAD
from hpcray.graphs.channel_memory import FOREVER, ChannelClosed, ChannelMemory
from hpcray.graphs.channels import Failed, Party, PartyChannels, ValueReader, wire
from hpcray.graphs.compiled_dag_ref import CompiledDAGFuture, CompiledDAGRef, DAGContext, as_in_ray
from hpcray.graphs.compiled_graphs import CloseGraph, CompiledGraphs, OpenGraph
from hpcray.graphs.execution_loop import ActorPart, join_graph, leave_graph, make_memory, run_loop
from hpcray.graphs.graph_plan import DRIVER, GraphPlan, make_plan
from hpcray.graphs.visualization import draw_ascii, draw_graphviz
from hpcray.protocol import messages as m
from hpcray.protocol.serializability import not_serializable
from hpcray.protocol.serialization import SerializationError
from hpcray.runtime.core_worker.actor_submitter import GRAPHS_GROUP
from hpcray.runtime.core_worker.core_worker import CoreWorker, need_process
from hpcray.runtime.core_worker.object_refs import ObjectRef

# ------------------------------------------------------------ graph life
# A compiled graph from its start to its end, apart from the values in it.

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
            process.reader.when_available(loop, lambda value, error, loop=loop: self._loop_ended(loop))  # type: ignore[misc]

    def _call(self, actor: int, group: str, function: Any, *args: Any) -> Any:
        method = self.plan.actors[actor].__ray_call__
        options = {"max_task_retries": 0, **({"concurrency_group": group} if group else {})}
        return method.options(**options).remote(function, *args)

    def _start(self, slots: int, capacity: int) -> PartyChannels:
        process, plan = self.process, self.plan
        joining = [self._call(actor, "", join_graph, self.ident, process.me) for actor in range(len(plan.actors))]
        self._parties = dict(enumerate(process.reader.get(joining, None)))
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
                places[where.node] = process.reader.get_one(
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
            ready, _ = process.waits.wait([loop], 1, max(0.0, deadline - time.monotonic()), False)
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
            self.process.reader.get_one(self._failed, None)
        raise RayChannelError("Channel closed.")

    def raise_closed(self) -> None:
        """Raise RayChannelError, as Ray does where a graph that has ended is executed. Its cause says why it ended."""
        try:
            self.raise_reason()
        except RayActorError as reason:
            raise RayChannelError("Channel closed.") from reason


# ------------------------------------------------------------ compiled dag node

_MOST_CAPACITY = 1 << 20
_GET_HINT = (
    "If the execution is expected to take a long time, increase RAY_CGRAPH_get_timeout which is currently {} seconds. "
    "Otherwise, this may indicate that the execution is hanging."
)
_SUBMIT_HINT = (
    "If the execution is expected to take a long time, increase RAY_CGRAPH_submit_timeout which is currently {} "
    "seconds. Otherwise, this may indicate that execution is hanging."
)


class CompiledDAG:
    """A graph of actor calls that is executed over channels between the actors. `experimental_compile` makes it.

    One thread uses it. Results come in the order of the executions.
    """

    def __init__(
        self, plan: GraphPlan, submit_timeout: float, buffer_size: int, is_async: bool, inflight: int, buffered: int
    ) -> None:
        context = DAGContext.get_current()
        self._dag_id = uuid.uuid4().hex
        self._plan = plan
        self._submit_timeout, self._get_timeout = submit_timeout, context.get_timeout
        self._enable_asyncio = is_async
        self._max_inflight_executions, self._max_buffered_results = inflight, buffered
        self._execution_index = self._max_finished_execution_index = -1
        self._result_buffer: dict[int, dict[int, Any]] = {}
        self._dropped: dict[int, set[int]] = {}
        self._read: dict[int, Any] = {}
        self._given: dict[int, dict[int, Any]] = {}
        self._is_teardown = False
        process = need_process()
        self._engine = process.engine
        ident = bytes.fromhex(self._dag_id)
        self._life = GraphLife(process, ident, plan, inflight, min(buffer_size, _MOST_CAPACITY))
        self._finalizer = weakref.finalize(self, self._life.end)
        self._finalizer.atexit = False
        channels = self._life.channels
        self._inputs = [(value, key, channels.writers.get(value)) for value, key in plan.inputs]
        self._readers: dict[int, ValueReader] = channels.readers
        self._fetcher = _AsyncFetcher(self._life, plan.outputs, self._readers) if is_async else None

    @property
    def is_teardown(self) -> bool:
        """True after `teardown`, or the death of an actor."""
        return self._is_teardown or self._life.closed

    @property
    def dag_output_channels(self) -> list[int]:
        """The results of `execute`, as numbers of the graph's nodes."""
        return list(self._plan.outputs)

    @property
    def worker_task_refs(self) -> dict[Any, Any]:
        """The refs of the actors' loops, by handle. They are ready when the graph has ended."""
        return dict(zip(self._plan.actors, self._life.loops, strict=True))

    def get_id(self) -> str:
        """Return the id of the graph."""
        return self._dag_id

    def __str__(self) -> str:
        return f"CompiledDAG({self._dag_id})"

    # ------------------------------------------------------------ execution

    def execute(self, /, *args: Any, **kwargs: Any) -> CompiledDAGRef | list[CompiledDAGRef]:
        """Start one execution.

        Args:
            args, kwargs: what the graph's `InputNode` stands for.

        Returns:
            A `CompiledDAGRef`; a list of them where a `MultiOutputNode` ends the graph.

        Raises:
            ValueError: the arguments are not those of the graph. TypeError: one does not pickle.
            RayCgraphCapacityExceeded: too many executions are under way.
            RayChannelTimeoutError: there was no room in time. RayChannelError: the graph has ended.
        """
        if self._enable_asyncio:
            raise ValueError("Use execute_async if enable_asyncio=True")
        self._check_inputs(args, kwargs)
        if self._dropped:
            self._skip_dropped()
        self._check_capacity()
        self._write(args, kwargs)
        index = self._execution_index
        if self._plan.returns_list:
            return [CompiledDAGRef(self, index, output) for output in range(len(self._plan.outputs))]
        return CompiledDAGRef(self, index)

    async def execute_async(self, /, *args: Any, **kwargs: Any) -> CompiledDAGFuture | list[CompiledDAGFuture]:
        """Start one execution of a graph that was compiled with `enable_asyncio`.

        Returns:
            A `CompiledDAGFuture`; a list of them where a `MultiOutputNode` ends the graph.

        Raises the errors of `execute`.
        """
        if self._fetcher is None:
            raise ValueError("Use execute if enable_asyncio=False")
        self._check_inputs(args, kwargs)
        self._check_capacity()
        self._write(args, kwargs)
        index = self._execution_index
        future = self._fetcher.expect(self._given.pop(index, {}))
        if self._plan.returns_list:
            return [CompiledDAGFuture(self, index, future, output) for output in range(len(self._plan.outputs))]
        return CompiledDAGFuture(self, index, future)

    def _check_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plan = self._plan
        if len(args) != plan.positional:
            raise ValueError(
                f"dag.execute() or dag.execute_async() must be called with {plan.positional} positional args, got "
                f"{len(args)}"
            )
        for keyword in plan.keywords:
            if keyword not in kwargs:
                raise ValueError(f"dag.execute() or dag.execute_async() must be called with kwarg `{keyword}`")

    def _check_capacity(self) -> None:
        running = self._execution_index - self._max_finished_execution_index
        if running >= self._max_inflight_executions:
            raise RayCgraphCapacityExceeded(
                f"The compiled graph can't have more than {self._max_inflight_executions} in-flight executions, and "
                f"you currently have {running} in-flight executions. Retrieve an output using ray.get before "
                "submitting more requests or increase `_max_inflight_executions`. "
                "`dag.experimental_compile(_max_inflight_executions=...)`"
            )

    def _write(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._life.closed:
            self._life.raise_closed()
        timeout = self._submit_timeout
        deadline = FOREVER if timeout < 0 else time.monotonic() + timeout
        index = self._execution_index + 1
        given = {}
        try:
            for value, key, writer in self._inputs:
                item = kwargs[key] if isinstance(key, str) else args[key or 0]
                if value in self._plan.outputs:
                    given[value] = item
                if writer is not None:
                    writer.write(item, deadline)
        except SerializationError as error:
            self._fail_half_written(value)
            raise not_serializable("the input value %", error.value) from error
        except TimeoutError:
            raise RayChannelTimeoutError(_SUBMIT_HINT.format(timeout)) from None
        except ChannelClosed:
            self._life.raise_closed()
        if given:
            self._given[index] = given
        self._execution_index = index

    def _fail_half_written(self, failed: int) -> None:
        """If an input does not pickle and earlier ones were written, the graph cannot go on."""
        if self._inputs[0][0] != failed:
            self.teardown()

    # ------------------------------------------------------------ results

    def _result(self, index: int, output: int, timeout: float | None) -> Any:
        """The result of an execution, at its place in the outputs, which is forgotten here."""
        if self._max_finished_execution_index < index:
            if self._is_teardown:
                self._life.raise_reason()
            timeout = self._get_timeout if timeout is None else timeout
            deadline = FOREVER if timeout < 0 else time.monotonic() + timeout
            try:
                while self._max_finished_execution_index < index:
                    self._finish_next(deadline)
            except TimeoutError:
                raise RayChannelTimeoutError(_GET_HINT.format(self._get_timeout)) from None
            except ChannelClosed:
                self._life.raise_reason()
        buffered = self._result_buffer[index]
        found = buffered.pop(output)
        if not buffered:
            del self._result_buffer[index]
        return found

    def _finish_next(self, deadline: float) -> None:
        """Wait for the results of the first execution that has not finished."""
        index = self._max_finished_execution_index + 1
        outputs = self._plan.outputs
        dropped = self._dropped.get(index, ())
        wanted = [output for output in range(len(outputs)) if output not in dropped]
        if wanted and len(self._result_buffer) >= self._max_buffered_results:
            raise RayCgraphCapacityExceeded(
                f"The compiled graph can't have more than {self._max_buffered_results} buffered results, and you "
                f"currently have {len(self._result_buffer)} buffered results. Call `ray.get()` on CompiledDAGRef's (or "
                "await on CompiledDAGFuture's) to retrieve results, or increase `_max_buffered_results` if buffering "
                "is desired, note that this will increase driver memory usage."
            )
        found, needed = self._read, {outputs[output] for output in wanted}
        for value, reader in self._readers.items():
            if value not in found:  # else it was read before a timeout
                self._await(reader, deadline)
                found[value] = reader.read(deadline) if value in needed else reader.skip(deadline)
        found |= self._given.pop(index, {})
        self._read = {}
        # The ref of an output may have been dropped meanwhile: by the garbage collector, in the middle of this.
        self._max_finished_execution_index = index
        dropped = self._dropped.pop(index, ())
        values = as_in_ray([found[outputs[output]] for output in wanted])
        kept = {output: value for output, value in zip(wanted, values, strict=True) if output not in dropped}
        if kept:
            self._result_buffer[index] = kept

    def _await(self, reader: ValueReader, deadline: float) -> None:
        """Wait until a value can be read from shared memory. An interrupt is let through, and changes nothing."""
        ring = reader.ring
        if ring is None or ring.ready():
            return
        asleep, me = self._engine.asleep, threading.get_ident()
        try:
            asleep.add(me)
            ring.wait(deadline)
        finally:
            asleep.discard(me)

    def _drop(self, index: int, output: int) -> None:
        """Drop a result whose ref is gone. Destructors call it, so it does not wait."""
        if self._fetcher is not None:
            self._max_finished_execution_index = max(self._max_finished_execution_index, index)
        elif index > self._max_finished_execution_index:
            self._dropped.setdefault(index, set()).add(output)
        elif (buffered := self._result_buffer.get(index)) is not None:
            buffered.pop(output, None)
            if not buffered:
                self._result_buffer.pop(index, None)

    def _skip_dropped(self) -> None:
        """Finish executions whose refs are all gone; wait for them if there is no room for another one."""
        count = len(self._plan.outputs)
        deadline = FOREVER if self._get_timeout < 0 else time.monotonic() + self._get_timeout
        try:
            while len(self._dropped.get(self._max_finished_execution_index + 1, ())) == count:
                full = self._execution_index - self._max_finished_execution_index >= self._max_inflight_executions
                self._finish_next(deadline if full else 0.0)
        except TimeoutError:
            if full:
                raise RayChannelTimeoutError(
                    "Releasing native buffers corresponding to a stale CompiledDAGRef is taking a long time. "
                    + _GET_HINT.format(self._get_timeout)
                ) from None
        except ChannelClosed:
            self._life.raise_closed()

    # ------------------------------------------------------------ the rest

    def visualize(
        self, filename: str = "compiled_graph", format: str = "png", view: bool = False, channel_details: bool = False
    ) -> str:
        """Draw the graph.

        Args:
            filename: of the picture, without its extension.
            format: one of Graphviz, or "ascii" for text.
            view: open the picture, or print the text.
            channel_details: write at each edge how its values travel.

        Returns:
            The picture in the language of Graphviz, or the text.

        Raises:
            ImportError: the package `graphviz` is not there. ValueError: `channel_details` with "ascii".
        """
        if format != "ascii":
            return draw_graphviz(self._plan, filename, format, view, channel_details)
        if channel_details:
            raise ValueError("Parameters 'channel_details' are not compatible with 'ascii' format.")
        text = draw_ascii(self._plan)
        if view:
            print(text)
        return text

    def teardown(self, kill_actors: bool = False) -> None:
        """End the graph. The actors can be used for other calls and graphs afterwards.

        Args:
            kill_actors: kill them.
        """
        if self._is_teardown:
            return
        self._is_teardown = True
        life = self._life
        life.end()
        life.wait(DAGContext.get_current().teardown_timeout, kill_actors)


class _AsyncFetcher:
    """A thread that reads the results of a graph for an event loop."""

    def __init__(self, life: GraphLife, outputs: list[int], readers: dict[int, ValueReader]) -> None:
        self._expected: SimpleQueue[tuple[asyncio.Future[list[Any]], dict[int, Any]]] = SimpleQueue()
        args = (self._expected, life, outputs, readers)
        threading.Thread(target=_fetch, args=args, name="hpcray-compiled-graph", daemon=True).start()

    def expect(self, given: dict[int, Any]) -> asyncio.Future[list[Any]]:
        """Return the future of the next execution. given: results that are inputs."""
        future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._expected.put((future, given))
        return future

    def __del__(self) -> None:
        self._expected.put((None, {}))  # type: ignore[arg-type]


def _fetch(
    expected: SimpleQueue[tuple[Any, dict[int, Any]]],
    life: GraphLife,
    outputs: list[int],
    readers: dict[int, ValueReader],
) -> None:
    while (entry := expected.get())[0] is not None:
        future, found = entry
        try:
            found = {**found, **{value: reader.read(FOREVER) for value, reader in readers.items()}}
        except ChannelClosed:
            try:
                life.raise_reason()
            except Exception as error:
                found = dict.fromkeys(outputs, Failed(error))
        values = as_in_ray([found[value] for value in outputs])
        try:
            future.get_loop().call_soon_threadsafe(_set, future, values)
        except RuntimeError:
            pass  # the loop is closed
        del entry, future, found, values


def _set(future: asyncio.Future[list[Any]], values: list[Any]) -> None:
    if not future.done():
        future.set_result(values)


def compile_graph(
    output: Any,
    submit_timeout: float | None,
    buffer_size: int | None,
    is_async: bool,
    inflight: int | None,
    buffered: int | None,
) -> CompiledDAG:
    """Compile the graph that ends at a node; None stands for the context's setting.

    Raises:
        ValueError: the graph cannot be compiled. NotImplementedError: it has tasks, or no input.
    """
    context = DAGContext.get_current()

    def chosen(given: Any, setting: Any) -> Any:
        return setting if given is None else given

    size = chosen(buffer_size, context.buffer_size_bytes)
    if not isinstance(size, int) or size <= 0:
        raise ValueError(f"`buffer_size_bytes` must be a positive integer, found {size}")
    return CompiledDAG(
        make_plan(output), chosen(submit_timeout, context.submit_timeout), size, is_async,
        chosen(inflight, context.max_inflight_executions), chosen(buffered, context.max_buffered_results),
    )  # fmt: skip
