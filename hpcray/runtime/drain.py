"""A raylet's part in the announced end of its job: signals and the clock on one side, `core.drain` on the other.

Every raylet passes requests to the head, tells its processes what the head says, and starts nothing new meanwhile.
"""

from __future__ import annotations

import importlib
import signal
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hpcray.base.drain_errors import JobDrainingError, NotEnoughTimeError
from hpcray.base.ids import HEAD, raylet_of
from hpcray.core import drain as core
from hpcray.core.gcs.head import HeadCore
from hpcray.runtime.local_links import DRIVER, WORKER
from hpcray.runtime.raylet import Raylet
from hpcray.wire import messages as m
from hpcray.wire.serialization import serialize_error

if TYPE_CHECKING:
    from hpcray.runtime.driver_child import DriverChild

LEAVING_TIME = 8.0
"""What the end of all processes and of MPI may take after a drain, at most."""
_SHORTEST = 1.0
_LINES = 10
_EARLY = 0.5
_NOTHING: tuple[()] = ()


class Drain:
    """Of one raylet.

    Args:
        raylet: its tables get the handlers of this conversation.
        end_job: ends the job with an exit code.

    Attributes:
        announced: whether the job drains.
        again: whether the batch system should be asked to run the job again (the head, when the job is over).
    """

    def __init__(self, raylet: Raylet, end_job: Callable[[int], None]) -> None:
        self.announced = False
        self.again = False
        self._raylet = raylet
        self._config = raylet.seat.config
        self._end_job = end_job
        self._deadline = 0.0
        self._reason = ""
        self._passed_on: set[int] = set()
        self._core: core.DrainCore | None = None
        self._far = b""
        raylet.on_joined = self._joined
        raylet.headship.listeners.append(self._tell_driver)
        raylet.handlers |= {m.Drain: self._drain, m.DrainOver: self._over}

    def lead(self, run: m.RunInfo, head: HeadCore) -> None:
        """This is the head: it decides."""
        self._raylet.run = run
        self._core = core.DrainCore(run.exit_code, run.signals)
        self._head = head
        head.actors.refuse = self._refuse_actor
        raylet = self._raylet
        raylet.handlers |= {m.DrainRequest: self._requested, m.DrainReady: self._ready, m.ActorSaved: self._saved}
        raylet.handlers[m.DriverIs] = self._driver_is
        raylet.carriers |= {
            core.Announce: self._announce,
            core.StartSaving: self._start_saving,
            core.AllSaved: self._all_saved,
            core.EndJob: self._end,
        }

    def take_over(self, head: HeadCore) -> None:
        """This is the head from now on. What the old one had announced begins again, with the time that is left."""
        self.lead(self.run, head)
        left = self._deadline - self._raylet.loop.now
        if self.announced:
            self._raylet.router.send(HEAD, m.DrainRequest(self._reason, max(_SHORTEST, left)))
        elif self.run.drain_at:
            self._await_end()

    @property
    def run(self) -> m.RunInfo:
        """What the head knows of this run of the job; on other nodes once the cluster is up."""
        return self._raylet.run

    def came_up(self) -> None:
        """The cluster is up: from now on its end may come near."""
        if self._core is not None and self.run.drain_at:
            self._await_end()

    # ------------------------------------------------------------ what begins it

    def signalled(self, number: int, driver: DriverChild | None) -> bool:
        """This process got a signal. Whether it announces the job's end, and so does nothing else."""
        if number not in self.run.signals:
            return False
        if driver is not None and number not in self._passed_on:
            self._passed_on.add(number)  # once: a driver without a handler of its own sends it back
            driver.pass_on(number)
        name = signal.Signals(number).name
        self._raylet.router.send(HEAD, m.DrainRequest(f"{name} on node {self._raylet.node}", 0.0, number))
        return True

    def _await_end(self) -> None:
        left = self.run.drain_at - time.time()
        if left > _EARLY:
            # The clock may be set meanwhile.
            self._raylet.loop.call_at(self._raylet.loop.now + min(left, 60.0), self._await_end)
        else:
            self._raylet.router.send(HEAD, m.DrainRequest("the end of the job's time limit"))

    def _requested(self, now: float, src: bytes, msg: m.DrainRequest) -> Iterable[Any]:
        assert self._core is not None
        known = self._core.begun
        effects = self._core.begin(now, msg.reason, self._time_for(msg), msg.signal == signal.SIGTERM)
        here = any(link.kind not in (WORKER, "") for link in self._raylet.router.links.values())
        if not known and not here and not self._far:
            effects += self._core.driver_ready(now)  # nobody's callbacks to wait for
        return effects

    def _time_for(self, msg: m.DrainRequest) -> float:
        config = self._config
        if msg.signal == signal.SIGTERM:
            limit = config.drain_timeout
        else:
            limit = msg.seconds or config.drain_margin or config.drain_timeout
        if self.run.end:
            limit = min(limit, self.run.end - time.time() - LEAVING_TIME)
        return max(_SHORTEST, limit)

    # ------------------------------------------------------------ what everybody does

    def _driver_is(self, now: float, src: bytes, msg: m.DriverIs) -> Iterable[Any]:
        self._far = msg.proc
        return _NOTHING

    def _tell_driver(self) -> None:
        """The head, unless it is here, must know who the driver is: the others that have attached may say nothing."""
        router = self._raylet.router
        for proc, link in router.links.items():
            if link.kind == DRIVER and router.headship.node != self._raylet.node:
                router.send(HEAD, m.DriverIs(proc))

    def _joined(self, proc: bytes) -> None:
        if self._raylet.router.links[proc].kind == DRIVER:
            self._tell_driver()
        if self.announced:
            left = max(0.0, self._deadline - self._raylet.loop.now)
            self._raylet.router.send(proc, m.Drain(self._reason, left))

    def _drain(self, now: float, src: bytes, msg: m.Drain) -> Iterable[Any]:
        raylet = self._raylet
        first, self.announced = not self.announced, True
        self._reason = msg.reason
        self._deadline = now + msg.seconds
        for proc in raylet.router.links:
            raylet.router.send(proc, msg)
        return raylet.core.drain(now) if first else _NOTHING

    def _over(self, now: float, src: bytes, msg: m.DrainOver) -> Iterable[Any]:
        for proc, link in self._raylet.router.links.items():
            if link.kind != WORKER:
                self._raylet.router.send(proc, msg)
        return _NOTHING

    # ------------------------------------------------------------ the head

    def driver_ended(self, code: int) -> bool:
        """The driver is gone, or says goodbye. Whether the drain ends the job now, or holds its end back."""
        self._far = b""
        if self._core is None or self._core.state == core.OVER:
            return False
        if not self._core.begun:
            # Slurm signals all processes of a step: it may be the first to have felt it.
            if code != core.SIGNALLED + signal.SIGUSR1 or signal.SIGUSR1 not in self.run.signals:
                return False
            request = m.DrainRequest("SIGUSR1 to the program", 0.0, signal.SIGUSR1)
            self._raylet.apply(self._core.begin(self._raylet.loop.now, request.reason, self._time_for(request)))
        self._raylet.apply(self._core.driver_ended(self._raylet.loop.now, code))
        return True

    def tick(self) -> None:
        """Every `config.tick`."""
        if self._core is not None and self._core.begun:
            self._raylet.apply(self._core.tick(self._raylet.loop.now, self._head.actors.living()))

    def _ready(self, now: float, src: bytes, msg: m.DrainReady) -> Iterable[Any]:
        assert self._core is not None
        link = self._raylet.router.links.get(src)
        if src != self._far and (link is None or link.kind != DRIVER):
            return _NOTHING
        return self._core.driver_ready(now, msg.interested)

    def _saved(self, now: float, src: bytes, msg: m.ActorSaved) -> Iterable[Any]:
        assert self._core is not None
        return self._core.saved(now, src, msg.path, msg.error)

    def _announce(self, effect: core.Announce) -> None:
        raylet = self._raylet
        raylet.say(f"the job drains ({effect.reason}): {effect.seconds:.0f} s are left, nothing new is started")
        for node in range(raylet.seat.cluster_size):
            raylet.router.send(raylet_of(node), m.Drain(effect.reason, effect.seconds))
        raylet.apply(self._head.actors.refuse_waiting(raylet.loop.now))

    def _start_saving(self, effect: core.StartSaving) -> None:
        assert self._core is not None
        self._raylet.apply(self._core.save(self._raylet.loop.now, self._head.actors.living()))

    def _all_saved(self, effect: core.AllSaved) -> None:
        raylet = self._raylet
        if effect.saved:
            raylet.say(f"checkpoints written below {self.run.checkpoints}, actors: {len(effect.saved)}")
        for text in effect.failed[:_LINES]:
            raylet.say(f"no checkpoint of {text}")
        if len(effect.failed) > _LINES:
            raylet.say(f"nor of {len(effect.failed) - _LINES} more actors")
        for node in range(raylet.seat.cluster_size):
            raylet.router.send(raylet_of(node), m.DrainOver())

    def _end(self, effect: core.EndJob) -> None:
        if effect.late:
            self._raylet.say("the time is up and the program still runs: it is ended")
        self.again = effect.again
        self._end_job(effect.code)

    def _refuse_actor(self, now: float, spec: m.ActorSpec) -> tuple[str, bytes] | None:
        """Why an actor is not started, and the error that its calls get; None when it may be."""
        error: BaseException | None = None
        what = f"actor {spec.class_name}"
        if self._core is not None and self._core.begun:
            why = f"the job drains ({self._core.reason}), {max(0.0, self._core.deadline - now):.0f} s are left"
            error = JobDrainingError(f"{what} was not started: {why}; hint: end the program, the next run can start it")
        elif spec.max_runtime and self.run.drain_at:
            left = max(0.0, self.run.drain_at - time.time())
            if left < spec.max_runtime:
                error = NotEnoughTimeError(what, spec.max_runtime, left)
        if error is None:
            return None
        importlib.import_module(type(error).__module__)  # else it would be pickled as another class of that name
        return str(error), serialize_error(error)
