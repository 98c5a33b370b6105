"""Objects over UCX: tagged messages straight from one arena into another.

Nothing is posted before it arrives: `receive` only notes where the bytes shall go, and `progress` matches what has
come. So a receive that is cancelled leaves nothing behind in UCX that could write into memory of another owner.
What is beyond UCX's rendezvous threshold waits in the sender's arena until it is matched, so this costs no copy. One
`send` is one UCX message: UCX itself moves it in pieces, many to a millisecond.

When a link breaks, all transfers over it end with an error, and the next one goes over a new endpoint.
"""

from __future__ import annotations

import time
from typing import Any

from hpcray.transport.base import FOREVER, Backoff, Range, Report, StoreMemory
from hpcray.transport.ucx_engine import UcxEngine

_CLASS = 0xF << 60
_DATA = 2 << 60
_LABEL_MASK = (1 << 60) - 1
_NUMBER_MASK = (1 << 32) - 1
_LINK_END_TIMEOUT = 2.0  # seconds that UCX has to end the transfers of a broken link
_DOUBTFUL_END_TIMEOUT = 30.0  # the same, for what was received since a new link was made: it may travel over that one
_LOOK_PERIOD = 0.1  # seconds between two looks at them
_UNKNOWN_NODE = -1
_ROUNDS = 3  # of matching in one `progress`

_Place = tuple[int, int, int, int]  # source node, offset, size, tag
_Flight = tuple[Any, str, int, int, Any, int]
"""Request, "sent" or "received" or "" (thrown away), node, tag, buffer, the number of the latest link at its start."""


class UcxData:
    """The `DataPlane` over UCX.

    Attributes:
        engine: carries the transfers; the control transport may use it too.
    """

    name = "ucx"

    def __init__(self, engine: UcxEngine) -> None:
        self.engine = self._engine = engine
        engine.claim(_DATA >> 60)
        self._any_data = engine.lib.UCXXTag(_DATA)
        self._class_mask = engine.lib.UCXXTagMask(_CLASS)
        self._memory = StoreMemory()
        self._expected: dict[int, _Place] = {}  # by label
        self._labels: dict[int, int] = {}  # of what is expected, by tag
        self._flights: list[_Flight] = []
        self._failing: list[tuple[_Flight, float, str]] = []  # over a broken link; deadline, reason
        self._stuck: list[_Flight] = []
        self._done: list[Report] = []
        self._backoff = Backoff()
        engine.ripe_checks.append(self._ripe)
        engine.link_listeners.append(self._link_broken)

    def address(self) -> bytes:
        """The UCX worker address."""
        return self._engine.address()

    def connect(self, node: int, address: bytes, same_host: bool) -> None:
        self._engine.connect(node, address, same_host)

    def register(self, arena: memoryview, ranges: Range | None = None) -> None:
        """UCX pins what it needs by itself, on first use, and keeps it pinned."""
        self._memory = StoreMemory(arena, ranges)

    def receive(self, node: int, tag: int, offset: int, size: int) -> None:
        if size == 0:
            self._done.append(("received", node, tag, None))
            return
        engine = self._engine
        label = self._labels[tag] = engine.label(node, engine.rank, tag & _NUMBER_MASK)
        self._expected[label] = (node, offset, size, tag)
        self._backoff.touch()

    def send(self, node: int, tag: int, offset: int, size: int) -> None:
        if size == 0:
            self._done.append(("sent", node, tag, None))
            return
        engine = self._engine
        try:
            endpoint = engine.endpoint(node)
            buffer = engine.array(self._memory.part(offset, size))
            label = engine.label(engine.rank, node, tag & _NUMBER_MASK)
            request = endpoint.tag_send(buffer, engine.lib.UCXXTag(_DATA | label))
        except Exception as error:
            self._done.append(("sent", node, tag, str(error)))
            return
        self._flights.append((request, "sent", node, tag, buffer, engine.link(node)))

    def cancel(self, tag: int) -> bool:
        label = self._labels.pop(tag, None)
        if label is not None and self._expected.pop(label, None) is not None:
            return True
        flights = [*self._flights, *(flight for flight, _, _ in self._failing)]
        return not any(what == "received" and its == tag for _, what, _, its, _, _ in flights)

    def forget(self, node: int, why: str) -> None:
        """A receive under way may still write until UCX has ended it. After the endpoint has been closed for
        `_LINK_END_TIMEOUT` seconds nothing can come any more, and it is given up."""
        flights, self._flights = self._flights, []
        for flight in flights:
            if flight[1] == "sent" and flight[2] == node:
                self._done.append(("sent", node, flight[3], why))
                self._stuck.append(flight)  # UCX may never end it, and holds on to its buffer
            else:
                self._flights.append(flight)
        self._link_broken(node, self._engine.link(node), why)
        self._engine.forget(node, why)

    def _link_broken(self, node: int, link: int, why: str) -> None:
        """What is expected may be lost, so it ends now; what is under way ends, as a failure, when UCX has ended it.

        What is sent over a later link goes on. What is received since then may travel over either.
        """
        for label in [label for label, place in self._expected.items() if place[0] == node]:
            tag = self._expected.pop(label)[3]
            del self._labels[tag]
            self._done.append(("received", node, tag, why))
        now = time.monotonic()
        flights, self._flights = self._flights, []
        for flight in flights:
            _, what, its_node, _, _, its_link = flight
            # What is received to be thrown away may come from any node, so over this link too.
            if not what or (its_node == node and its_link <= link):
                self._failing.append((flight, now + _LINK_END_TIMEOUT, why))
            elif its_node == node and what == "received":
                self._failing.append((flight, now + _DOUBTFUL_END_TIMEOUT, why))
            else:
                self._flights.append(flight)

    def progress(self) -> list[Report]:
        engine = self._engine
        moved = engine.progress()
        for _ in range(_ROUNDS):
            if not self._match():
                break
            moved |= engine.progress()  # small things are here at once
        if self._flights:
            self._land()
        if self._failing:
            self._end_failing()
        done, self._done = self._done, []
        if moved:
            self._backoff.touch()
        return done

    def busy(self) -> bool:
        return bool(self._flights or self._failing or self._expected or self._done)

    def patience(self) -> float:
        """UCX's own descriptor wakes us for what does not come soon."""
        if self._done or self._engine.hungry() or any(flight[0].completed for flight in self._flights):
            return 0.0
        if (self._expected or self._flights) and self._backoff.lively():
            return 0.0
        return _LOOK_PERIOD if self._failing else FOREVER

    def close(self) -> None:
        self._expected.clear()
        self._labels.clear()
        self._flights.clear()
        self._failing.clear()
        self._stuck.clear()
        self._done.clear()
        self._engine.close()
        self._memory = StoreMemory()

    def _ripe(self) -> bool:
        if self._done or any(flight[0].completed for flight in self._flights):
            return True
        found = self._engine.worker.tag_probe(self._any_data, self._class_mask, False)
        return bool(found.matched)

    def _match(self) -> bool:
        """Receive what has come; whether anything had."""
        worker = self._engine.worker
        any_came = False
        while True:
            found = worker.tag_probe(self._any_data, self._class_mask, False)
            if not found.matched:
                return any_came
            any_came = True
            self._take(found, found.sender_tag.value & _LABEL_MASK, found.length)

    def _take(self, found: Any, label: int, length: int) -> None:
        place = self._expected.pop(label, None)
        node, offset, size, tag = place or (_UNKNOWN_NODE, 0, -1, 0)
        self._labels.pop(tag, None)
        what = "received"
        if size == length:
            buffer = self._engine.array(self._memory.part(offset, length))
        else:
            # It is not expected (any more), but its sender waits until it is received. UCX tells it so without moving
            # the bytes, and whatever its length claims, a stranger's message gets no memory.
            buffer = self._engine.array(bytearray(1))
            what = ""
            if place is not None:
                self._done.append(("received", node, tag, f"{length} bytes came, {size} were expected"))
        request = self._engine.take(found, buffer)
        self._flights.append((request, what, node, tag, buffer, self._engine.link(node)))

    def _land(self) -> None:
        flying: list[_Flight] = []
        for flight in self._flights:
            request, what, node, tag, _, _ = flight
            if not request.completed:
                flying.append(flight)
                continue
            error: str | None = None
            try:
                request.check_error()
            except Exception as problem:
                error = str(problem)
            if what:
                self._done.append((what, node, tag, error))
        self._flights = flying

    def _end_failing(self) -> None:
        now = time.monotonic()
        failing, self._failing = self._failing, []
        self._stuck = [flight for flight in self._stuck if not flight[0].completed]
        for flight, deadline, why in failing:
            request, what, node, tag, _, _ = flight
            if not request.completed and now < deadline:
                self._failing.append((flight, deadline, why))
                continue
            if not request.completed:
                self._stuck.append(flight)  # UCX holds on to its buffer
            if what:
                self._done.append((what, node, tag, why))
