"""The end of a node's processes, and deadlines for MPI_Init and MPI_Finalize."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpcray.platform.fork_server import ForkServerClient
from hpcray.platform.process_tree import descendants, kill_descendants
from hpcray.platform.session_directory import SessionDirectory
from hpcray.platform.sockets import close_listeners
from hpcray.runtime.node.child_process import DriverChild
from hpcray.runtime.raylet.event_loop import EventLoop
from hpcray.runtime.raylet.local_processes import LocalProcesses

_TEMPLATE_TIME = 3.0
_SWEEP_TIME = 2.0
_POLL_INTERVAL = 0.002


class LoopEnd:
    """When the loop of a raylet ends: once its processes have ended, not before a time, and not while it is cut off.

    Args:
        may_wait: whether a node that is cut off may wait for the network.

    Attributes:
        processes_ended: only this process of the node is left.
    """

    def __init__(self, loop: EventLoop, may_wait: bool) -> None:
        self._loop, self.may_wait = loop, may_wait
        self.processes_ended = False
        self._not_before = self._isolated_since = 0.0

    def delay(self, seconds: float) -> None:
        """Have `leave` wait for so long from now."""
        self._not_before = self._loop.now + seconds

    def leave(self) -> None:
        """No other node waits for this one: stop, unless it is cut off."""
        if not self._isolated_since:
            self._loop.call_at(max(self._loop.now, self._not_before), self._loop.stop)

    def stop_if_ended(self) -> None:
        """The job has ended: stop, if only this process of the node is left."""
        if self.processes_ended:
            self._loop.stop()

    def isolate(self) -> None:
        """This node is cut off."""
        self._isolated_since = self._loop.now

    @property
    def isolated(self) -> bool:
        """Return True while this node is cut off."""
        return bool(self._isolated_since)

    def hears_others(self) -> bool:
        """Return True if this node was cut off, and has heard another one since."""
        return self.isolated and max(self._loop.last_heard.values(), default=0.0) > self._isolated_since

    def reconnect(self) -> None:
        """The network is back."""
        self._isolated_since = 0.0
        self.stop_if_ended()


class NodeShutdown:
    """The end of the processes of a node; runs once, in the raylet's loop.

    Args:
        on_ended: called when only this process of the node is left.
        extra_time: seconds that the template may need to remove the session directory, beyond the usual.

    Attributes:
        begun: whether the node is ending.
        code: the job's exit code, once begun.
    """

    def __init__(
        self,
        loop: EventLoop,
        processes: LocalProcesses,
        template: ForkServerClient,
        session: SessionDirectory,
        stop_timeout: float,
        on_ended: Callable[[], None],
        extra_time: float = 0.0,
    ) -> None:
        self._loop = loop
        self._processes = processes
        self._template = template
        self._session = session
        self._stop_timeout = stop_timeout
        self._on_ended = on_ended
        self.extra_time = extra_time
        self._template_time = _TEMPLATE_TIME + extra_time
        self._driver: DriverChild | None = None
        self._template_stopped = False
        self._gone = False
        self.begun = False
        self.code = 0

    def watch_driver(self, driver: DriverChild) -> None:
        """This node has the driver as a child: it must be gone too."""
        self._driver = driver

    def begin(self, code: int, stop_timeout: float | None = None) -> None:
        """Start to end the node; later calls change nothing.

        Args:
            code: the job's exit code.
            stop_timeout: seconds until processes that have not ended are killed; None: that of the settings.
        """
        if self.begun:
            return
        self.begun = True
        self.code = code
        self._processes.ask_to_leave(code)
        if self._driver is not None:
            self._driver.terminate()
        self._loop.call_at(
            self._loop.now + (self._stop_timeout if stop_timeout is None else stop_timeout), self._stop_template
        )
        self.check()

    def check(self) -> None:
        """A process has ended: go on if it was the last one."""
        if self.begun and not self._processes.workers and (self._driver is None or self._driver.poll() is not None):
            self._stop_template()

    def template_gone(self) -> None:
        """The template process has ended. If it was not stopped, this process does its clean-up."""
        if not self._template_stopped or os.path.exists(self._session.path):
            self._sweep()
        self._finish()

    # ------------------------------------------------------------ inside

    def _stop_template(self) -> None:
        if self._template_stopped or self._gone:
            return
        self._template_stopped = True
        if self._driver is not None:
            self._driver.kill()
        self._processes.stop_template()
        self._loop.call_at(self._loop.now + self._template_time, self._template_late)

    def _template_late(self) -> None:
        if not self._gone:
            self._template.kill_server()

    def _sweep(self) -> None:
        """Kill what a dead template leaves: its children die with it, theirs are now children of this sub-reaper."""
        spared = set()
        if self._driver is not None:
            spared = {self._driver.pid, *descendants(self._driver.pid)}
        deadline = time.monotonic() + _SWEEP_TIME
        while kill_descendants(os.getpid(), spared) and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL)
        self._session.remove()

    def _finish(self) -> None:
        if not self._gone:
            self._gone = True
            self._on_ended()


@contextmanager
def watchdog(seconds: float, text: str, code: int) -> Iterator[None]:
    """End this process when the `with` block takes too long, for calls that cannot be interrupted (MPI_Finalize).

    Args:
        seconds: the time the block may take.
        text: printed to stderr when it took longer; "" for nothing.
        code: the exit code then.
    """

    def end() -> None:
        with contextlib.suppress(OSError):
            if text:
                print(text, file=sys.stderr, flush=True)
        close_listeners()
        os._exit(code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
