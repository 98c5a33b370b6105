"""What a driver or worker knows of the announced end of its job, and does about it.

Callbacks run in a thread of their own: the main thread may sit in `get`, or in a task, and shall go on meanwhile.
"""

from __future__ import annotations

import inspect
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcray.base.ids import HEAD
from hpcray.runtime.engine import monotonic
from hpcray.runtime.refusals import Refusals
from hpcray.wire import messages as m

if TYPE_CHECKING:
    from hpcray.runtime.process import Process

Callback = Callable[[float], object]
callbacks: list[Callback] = []
"""What `on_drain` has registered in this interpreter, in that order."""

_LOOK = 0.05
_AFTER_DEADLINE = 1.0


class Ending:
    """Of one process.

    Attributes:
        reason: why the job drains; "" while it does not.
        deadline: monotonic time at which the job is ended.
        refusals: the work that is not started for it.
        on_begin: called once, with the engine's lock held, when the drain begins.
        interested: whether this program takes part in the drain: it is then given time.
    """

    def __init__(self, process: Process) -> None:
        self.reason = ""
        self.deadline = 0.0
        self.interested = False
        self.refusals = Refusals(process)
        self.refusals.on_refused = self.take_interest
        self.on_begin: list[Callable[[], object]] = []
        self._process = process
        self._pending: list[Callback] = []
        self._called: list[Callback] = []
        self._running = False
        self._ready = threading.Event()
        self._over = threading.Event()

    def handlers(self) -> dict[type, Callable[[bytes, Any], None]]:
        """Message handlers, for the engine."""
        return {
            m.Drain: lambda _, msg: self._announced(msg),
            m.DrainOver: lambda _, msg: self._over.set(),
        }

    def left(self) -> float:
        """Seconds until the job is ended, not below 0."""
        return max(0.0, self.deadline - monotonic())

    def register(self, callback: Callback) -> None:
        """Call it when the job drains; soon, when it does already."""
        with self._process.engine.lock:
            if self.reason:
                self._start([callback])

    def take_interest(self) -> None:
        """The program has asked whether the job drains, or got an error that says so (lock held)."""
        if not self.interested:
            self.interested = True
            if self._ready.is_set():
                self._say_ready()

    def settle(self) -> None:
        """Before the program ends while the job drains: let callbacks end, and actors write their checkpoints."""
        if not self.reason or self._process.kind == "worker":
            return
        self._wait(self._ready)
        self._wait(self._over)

    # ------------------------------------------------------------ inside

    def _announced(self, msg: m.Drain) -> None:
        first = not self.reason
        self.reason = msg.reason
        self.deadline = monotonic() + msg.seconds
        if first:
            self.refusals.all_tasks(msg.reason, self.left)
            for call in self.on_begin:
                call()
            self._start(list(callbacks))

    def _start(self, more: list[Callback]) -> None:
        """Run callbacks that have not run yet (lock held)."""
        self._pending += [callback for callback in more if callback not in self._called]
        self._called += more
        if not self._running:
            self._running = True
            threading.Thread(target=self._run, name="hpcray-drain", daemon=True).start()

    def _run(self) -> None:
        process = self._process
        while True:
            with process.engine.lock:
                if not self._pending:
                    self._running = False
                    self._ready.set()
                    self._say_ready()
                    return
                callback = self._pending.pop(0)
            call(callback, self.left())

    def _say_ready(self) -> None:
        process = self._process
        if process.kind != "worker":
            process.engine.send(HEAD, m.DrainReady(self.interested or bool(self._called)))
            process.engine.flush()

    def _wait(self, event: threading.Event) -> None:
        asleep, me = self._process.engine.asleep, threading.get_ident()
        asleep.add(me)  # a KeyboardInterrupt is let through
        try:
            while not event.wait(_LOOK):
                if self._process.dead is not None or monotonic() > self.deadline + _AFTER_DEADLINE:
                    return
        finally:
            asleep.discard(me)


def call(callback: Callback, seconds: float) -> None:
    """Run one callback; its errors are printed, others still run."""
    try:
        callback(seconds)
    except BaseException:
        traceback.print_exc()


def check_callback(callback: Any) -> None:
    """Raise TypeError for what cannot be a callback."""
    if not callable(callback):
        raise TypeError(f"on_drain takes a function of one argument (seconds left), not {callback!r}")
    if inspect.iscoroutinefunction(callback):
        raise TypeError(f"on_drain takes no coroutine function ({callback!r}); hint: a method of an actor may be one")


def time_left(run: m.RunInfo) -> float | None:
    """Seconds until the batch system ends the job, not below 0; None when that is not known."""
    return max(0.0, run.end - time.time()) if run.end else None
