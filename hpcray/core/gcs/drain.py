"""The announced end of a job, on the head: whom the head notifies, for whom it waits, and when the job is over.

The states and their order are in TRANSITIONS. No call of an actor runs after the actor has written its checkpoint, so
whatever a process has seen of the actor is in its checkpoint. The job ends at the deadline; before it, when a SIGTERM
began the drain and there is nothing to wait for: no checkpoint, and a program that does not take part in the drain.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Union

from msgspec import Struct, field

from hpcray.common.ids import raylet_of
from hpcray.core.effects import Effect, Send
from hpcray.protocol import messages as m

RUNNING, NOTICE, SAVING, SAVED, OVER = "running", "notice", "saving", "saved", "over"
TRANSITIONS: dict[str, tuple[str, ...]] = {
    # No end is announced.
    RUNNING: (NOTICE,),
    # Nothing new starts; callbacks run. Until the driver is ready or has ended, or CALLBACKS_SHARE of the time is gone.
    NOTICE: (SAVING, OVER),
    # Every actor that can writes its checkpoint and closes. Until all have answered, or the time is up.
    SAVING: (SAVED, OVER),
    # The driver may end by itself. Until it has ended, or the time is up.
    SAVED: (OVER,),
    # The job is being ended.
    OVER: (),
}
CALLBACKS_SHARE = 0.5
"""Share of the time that the driver's callbacks may take; the rest is for the actors' checkpoints."""
SIGNALLED = 128
"""A process that signal n ended has the exit code SIGNALLED + n."""
SIGTERM_CODE = SIGNALLED + 15
DEADLINE_STEP = 0.5
"""Seconds by which a new deadline must be earlier to be announced."""


class Announce(Struct, frozen=True):
    """Send every raylet, and through it every process, that `seconds` are left."""

    reason: str
    seconds: float


class StartSaving(Struct, frozen=True):
    """Call `DrainCore.save` with the workers of all living actors."""


class AllSaved(Struct, frozen=True):
    """Every checkpoint that could be written in time is; drivers may end.

    Attributes:
        saved: paths of the checkpoints.
        failed: what is missing and why, one line for each.
    """

    saved: tuple[str, ...]
    failed: tuple[str, ...]


class EndJob(Struct, frozen=True):
    """The drain is over: end the job.

    Attributes:
        code: the job's exit code.
        again: whether work is left, so that the batch system may run the job again.
        late: whether the driver had to be ended.
    """

    code: int
    again: bool
    late: bool


Outcome = Union[Send, Announce, StartSaving, AllSaved, EndJob]


class DrainCore(Struct):
    """The drain of one job: events in, outcomes out. Times are monotonic seconds.

    Args:
        exit_code: of a job that has work left to do.
        signals: those that announce the end of the job. A driver that one of them has ended had not come to
            `hpcray.init()` yet, and so has work left to do.
    """

    exit_code: int
    signals: tuple[int, ...] = ()
    state: str = RUNNING
    reason: str = ""
    deadline: float = 0.0
    interested: bool = False
    _brisk: bool = False
    _callbacks_until: float = 0.0
    _waiting: dict[bytes, str] = field(default_factory=dict)
    _early: set[bytes] = field(default_factory=set)
    _saved: list[str] = field(default_factory=list)
    _failed: list[str] = field(default_factory=list)
    _ended: int | None = None

    @property
    def begun(self) -> bool:
        """Whether the job drains, or has drained."""
        return self.state != RUNNING

    def begin(self, now: float, reason: str, seconds: float, brisk: bool = False) -> list[Outcome]:
        """Drain, within `seconds`. Once begun, only an earlier deadline changes anything.

        Args:
            brisk: whether a job that does not take part ends at once, as it would without hpcray.
        """
        if self.state == OVER:
            return []
        deadline = now + seconds
        first = self.state == RUNNING
        if first:
            self._set_state(NOTICE)
            self.reason = reason
        self._brisk = self._brisk or brisk
        if not first and deadline > self.deadline - DEADLINE_STEP:
            return self._check_ended()
        self.deadline = deadline
        self._callbacks_until = now + CALLBACKS_SHARE * seconds
        return [Announce(self.reason, seconds), *self._check_ended()]

    def driver_ready(self, now: float, interested: bool = False) -> list[Outcome]:
        """The driver's callbacks have run, or there is no driver to wait for. interested: it takes part."""
        self.interested = self.interested or interested
        if self.state != NOTICE:
            return []
        self._set_state(SAVING)
        return [StartSaving()]

    def save(self, now: float, actors: dict[bytes, str]) -> list[Outcome]:
        """Answer to `StartSaving`: the worker of each living actor, and its title for users."""
        self._waiting = {worker: title for worker, title in actors.items() if worker not in self._early}
        out: list[Outcome] = [Send(worker, m.SaveActor()) for worker in self._waiting]
        return out + self._check_saved()

    def saved(self, now: float, worker: bytes, path: str, error: str) -> list[Outcome]:
        """An actor has written its checkpoint, has none to write, or failed; an actor that exits reports unasked."""
        title = self._waiting.pop(worker, None)
        if title is None and self.state != NOTICE:
            return []
        self._early.add(worker)
        if error:
            self._failed.append(error)
        elif path:
            self._saved.append(path)
        return self._check_saved()

    def driver_ended(self, now: float, code: int) -> list[Outcome]:
        """The driver is gone; the job ends when what is being saved is saved."""
        self._ended = self.exit_code if self._unprepared(code) and code != SIGTERM_CODE else code
        if self.state == NOTICE:
            return self.driver_ready(now)
        return self._check_ended()

    def tick(self, now: float, alive: Iterable[bytes]) -> list[Outcome]:
        """Check deadlines, and for actors that died before they answered. `alive`: the workers of all living actors."""
        out: list[Outcome] = []
        if self.state == NOTICE and now >= self._callbacks_until:
            out += self.driver_ready(now)
        if self.state == SAVING and self._waiting:
            living = set(alive)
            for worker in [worker for worker in self._waiting if worker not in living]:
                self._failed.append(f"{self._waiting.pop(worker)}: it died before its checkpoint was written")
            out += self._check_saved()
        if self.begun and self.state != OVER and now >= self.deadline:
            out += self._time_is_up()
        return out

    def _set_state(self, state: str) -> None:
        assert state in TRANSITIONS[self.state], f"drain: {self.state} -> {state}"
        self.state = state

    def check_invariants(self) -> None:
        """Check what each state implies."""
        assert self.state in TRANSITIONS
        assert not self._waiting or self.state == SAVING, f"{self.state} waits for {list(self._waiting.values())}"
        assert not self._waiting.keys() & self._early, "an actor that has answered is waited for"
        if self.state == RUNNING:
            assert not self.reason and not self.deadline and not self._saved and not self._failed

    def _check_saved(self) -> list[Outcome]:
        if self.state != SAVING or self._waiting:
            return []
        self._set_state(SAVED)
        out: list[Outcome] = [AllSaved(tuple(self._saved), tuple(self._failed))]
        return out + self._check_ended()

    def _check_ended(self) -> list[Outcome]:
        if self.state != SAVED:
            return []
        if self._ended is None:
            if not self._brisk or self.interested or self._saved or self._failed:
                return []
            self._set_state(OVER)
            return [EndJob(SIGTERM_CODE, True, False)]
        self._set_state(OVER)
        return [EndJob(self._ended, self._is_left(self._ended), False)]

    def _unprepared(self, code: int) -> bool:
        return code - SIGNALLED in self.signals

    def _is_left(self, code: int) -> bool:
        """Whether a driver that ended with this code has work left to do."""
        return code == self.exit_code or self._unprepared(code)

    def _time_is_up(self) -> list[Outcome]:
        for title in self._waiting.values():
            self._failed.append(f"{title}: it was busy until the time was up")
        self._waiting.clear()
        out: list[Outcome] = []
        if self.state in (NOTICE, SAVING):
            out.append(AllSaved(tuple(self._saved), tuple(self._failed)))
        self._set_state(OVER)
        late = self._ended is None
        code = self.exit_code if self._ended is None else self._ended
        out.append(EndJob(code, self._is_left(code), late))
        return out


# ------------------------------------------------------------ departures
# Nodes that leave a running job in good order: first they get no more work, then their objects go elsewhere, then they
# are gone. What is not done by the deadline is made again elsewhere, as after a node's death.
#
# Objects go in two ways. Their owners on other nodes copy them; of those that processes of the leaving node own, each
# borrower has its own node keep a copy.


FINISHING, EVACUATING, GONE = "finishing", "evacuating", "gone"
DEPARTURE_TRANSITIONS: dict[str, tuple[str, ...]] = {
    # It starts nothing new; its tasks end.
    FINISHING: (EVACUATING, GONE),
    # The owners of its objects have them copied to other nodes, and the borrowers of its processes keep copies.
    EVACUATING: (GONE,),
    # It is declared dead; it ends when it reads that.
    GONE: (),
}
"""States of a node that leaves."""
EVACUATION_SHARE = 0.5
"""Share of the time that is left for the objects when the tasks have ended, or must end."""
MOST_TARGETS = 64
"""Nodes among which the owners on one node choose for their objects. Those on another node choose among others."""


class NodeLeft(Struct, frozen=True):
    """A node has nothing that the job needs: declare it dead. kept_at: nodes that keep objects of its processes."""

    node: int
    reason: str
    kept_at: tuple[int, ...] = ()


class LeavingChanged(Struct, frozen=True):
    """These nodes are about to leave, by their deadlines: place nothing there."""

    deadlines: dict[int, float]


DepartureEvent = Union[NodeLeft, LeavingChanged]


class _Departure(Struct):
    reason: str
    deadline: float
    evacuate_at: float
    state: str = FINISHING
    awaited: set[int] = field(default_factory=set)
    kept_at: tuple[int, ...] = ()
    askers: list[tuple[bytes, int]] = field(default_factory=list)


class DepartureManager:
    """The head's side."""

    def __init__(self) -> None:
        self._leaving: dict[int, _Departure] = {}

    def leaving(self) -> dict[int, float]:
        """The nodes that leave, and by when."""
        return {node: departure.deadline for node, departure in self._leaving.items()}

    def request(
        self, now: float, node: int, reason: str, seconds: float, asker: tuple[bytes, int] | None = None
    ) -> list[Effect | DepartureEvent]:
        """Have a living node leave within `seconds`.

        Args:
            asker: a process, and the number of its request: it gets a GcsReply when the node is gone.
        """
        departure = self._leaving.get(node)
        if departure is not None:
            if asker is not None:
                departure.askers.append(asker)
            departure.deadline = min(departure.deadline, now + seconds)
            departure.evacuate_at = min(departure.evacuate_at, now + seconds * (1 - EVACUATION_SHARE))
            return []
        departure = _Departure(reason, now + seconds, now + seconds * (1 - EVACUATION_SHARE))
        departure.askers += [] if asker is None else [asker]
        self._leaving[node] = departure
        return [Send(raylet_of(node), m.Leave(seconds)), LeavingChanged(self.leaving())]

    def finished(self, node: int, living: Iterable[int]) -> list[Effect | DepartureEvent]:
        """A node that leaves has no task any more. living: all nodes that are in and live, it included."""
        departure = self._leaving.get(node)
        return [] if departure is None or departure.state != FINISHING else self._evacuate(node, living)

    def evacuated(self, sender: int, node: int, kept_at: Iterable[int] = ()) -> list[Effect | DepartureEvent]:
        """No process of `sender` owns an object that only `node` has; or, of `node` itself, one that others need."""
        departure = self._leaving.get(node)
        if departure is not None:
            departure.kept_at = tuple(sorted({*departure.kept_at, *kept_at}))
        if departure is None or departure.state != EVACUATING:
            return []
        departure.awaited.discard(sender)
        return [] if departure.awaited else self._leave(node)

    def node_died(self, node: int) -> list[Effect | DepartureEvent]:
        """A node is dead: one that was to leave, or one that others waited for."""
        out: list[Effect | DepartureEvent] = []
        departure = self._leaving.pop(node, None)
        if departure is not None:
            out += [Send(proc, m.GcsReply(number, True, b"\xc0")) for proc, number in departure.askers]
            out.append(LeavingChanged(self.leaving()))
        for other in list(self._leaving):
            out += self.evacuated(node, other)
        return out

    def tick(self, now: float, living: Iterable[int]) -> list[Effect | DepartureEvent]:
        """Look at the deadlines."""
        out: list[Effect | DepartureEvent] = []
        for node, departure in list(self._leaving.items()):
            if departure.state == FINISHING and now >= departure.evacuate_at:
                out += self._evacuate(node, living)
            if departure.state == EVACUATING and now >= departure.deadline:
                out += self._leave(node)
        return out

    def _evacuate(self, node: int, living: Iterable[int]) -> list[Effect | DepartureEvent]:
        departure = self._leaving[node]
        self._set_state(departure, EVACUATING)
        others = [other for other in living if other != node]
        targets = [other for other in others if other not in self._leaving]
        if not targets:
            return self._leave(node)
        departure.awaited = {*others, node}
        return [
            Send(raylet_of(one), m.Evacuate(node, _some(targets, place))) for place, one in enumerate([*others, node])
        ]

    def _leave(self, node: int) -> list[Effect | DepartureEvent]:
        departure = self._leaving[node]
        self._set_state(departure, GONE)
        return [NodeLeft(node, departure.reason, departure.kept_at)]

    def _set_state(self, departure: _Departure, state: str) -> None:
        assert state in DEPARTURE_TRANSITIONS[departure.state], f"a node that leaves: {departure.state} -> {state}"
        departure.state = state

    def check_invariants(self) -> None:
        """Check that every node that leaves waits for something."""
        for node, departure in self._leaving.items():
            assert departure.evacuate_at <= departure.deadline
            assert departure.state != EVACUATING or departure.awaited, f"node {node} waits for no answer"


def _some(targets: list[int], place: int) -> list[int]:
    """At most `MOST_TARGETS` of the targets; for each place others, in turn."""
    if len(targets) <= MOST_TARGETS:
        return targets
    begin = place * MOST_TARGETS % len(targets)
    found = targets[begin : begin + MOST_TARGETS]
    return found + targets[: MOST_TARGETS - len(found)]
