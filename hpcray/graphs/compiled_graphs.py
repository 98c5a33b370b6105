"""The compiled graphs that this process takes part in: values from processes of other nodes, and the end of a graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Union

from msgspec import Struct

from hpcray.core.core_worker.object_table import Waiter
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.runtime.core_worker.extensions import Extension
from hpcray.runtime.core_worker.io_engine import IoEngine


class ChannelValue(Struct, array_like=True, tag=0):
    """writer→reader of another node: the value with this number in a compiled graph, of the next execution. stored:
    `blob` is that of a ref, whose object is the value."""

    graph: bytes
    value_number: int
    blob: bytes
    stored: bool = False


class CloseGraph(Struct, array_like=True, tag=1):
    """driver of a compiled graph→process with an actor of it: it is torn down."""

    graph: bytes


GraphMessage = Union[ChannelValue, CloseGraph]


class OpenGraph:
    """One graph.

    Args:
        driver: the process that compiled it; the graph ends with it.
        on_close: called once when the graph ends, under the engine's lock.

    Attributes:
        closed: whether the graph has ended. inboxes: values that came and were not read, by their number in the graph.
    """

    def __init__(self, engine: IoEngine, driver: bytes, on_close: Callable[[], object]) -> None:
        self._engine = engine
        self._on_close = on_close
        self._waiters: dict[int, Waiter] = {}
        self.driver = driver
        self.closed = False
        self.inboxes: dict[int, deque[ChannelValue]] = {}

    def put(self, msg: ChannelValue) -> None:
        """Add a value (lock held)."""
        self.inboxes.setdefault(msg.value_number, deque()).append(msg)
        self._wake(msg.value_number)

    def take(self, value_number: int, deadline: float | None) -> ChannelValue | None:
        """Wait for the next value with this number; None if the graph has ended.

        Raises:
            TimeoutError: none came before the deadline (monotonic seconds).
        """
        engine = self._engine
        with engine.lock:
            inbox = self.inboxes.setdefault(value_number, deque())
            while not inbox:
                if self.closed:
                    return None
                waiter = self._waiters[value_number] = Waiter()
                if not engine.wait(waiter, deadline):
                    raise TimeoutError
            return inbox.popleft()

    def close(self) -> None:
        """End the graph (lock held)."""
        if not self.closed:
            self.closed = True
            for value_number in list(self._waiters):
                self._wake(value_number)
            self._on_close()

    def _wake(self, value_number: int) -> None:
        waiter = self._waiters.pop(value_number, None)
        if waiter is not None and waiter.count > 0:
            waiter.count = 0
            self._engine.notify(waiter)


class CompiledGraphs(Extension):
    """All graphs of this process, by id."""

    name = "graphs"
    messages = GraphMessage

    def __init__(self, process: CoreWorker) -> None:
        super().__init__(process)
        self._engine = process.engine
        self._graphs: dict[bytes, OpenGraph] = {}

    def open(self, graph: bytes, driver: bytes, on_close: Callable[[], object]) -> OpenGraph:
        """Take part in a graph, until `forget`."""
        made = OpenGraph(self._engine, driver, on_close)
        with self._engine.lock:
            self._graphs[graph] = made
        return made

    def forget(self, graph: bytes) -> None:
        """Leave a graph: what still comes for it is dropped."""
        with self._engine.lock:
            self._graphs.pop(graph, None)

    def on_message(self, source: bytes, message: ChannelValue | CloseGraph) -> None:
        """Add a value to its inbox, or end a graph."""
        graph = self._graphs.get(message.graph)
        if graph is None:
            return
        if isinstance(message, ChannelValue):
            graph.put(message)
        else:
            graph.close()

    def process_died(self, proc: bytes) -> None:
        """End the graphs of a driver that has ended."""
        for graph in list(self._graphs.values()):
            if graph.driver == proc:
                graph.close()

    def disconnected(self) -> None:
        """End all graphs."""
        for graph in list(self._graphs.values()):
            graph.close()
