"""The end of a node: its signals, its driver child, its processes, and deadlines for MPI_Init and MPI_Finalize."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hpcray.platform.fork_server import ForkServerClient
from hpcray.platform.launcher_environment import strip_launcher_variables
from hpcray.platform.path_relocation import PathRelocation
from hpcray.platform.process_tree import descendants, handles_signal, kill_descendants
from hpcray.platform.session_directory import ADDRESS, SessionDirectory
from hpcray.platform.status_line import TERMINAL_SIZE
from hpcray.protocol import messages as m
from hpcray.runtime.node.node_drain import NodeDrain
from hpcray.runtime.raylet.event_loop import EventLoop
from hpcray.runtime.raylet.local_processes import LocalProcesses
from hpcray.runtime.raylet.raylet import Raylet
from hpcray.transport.base import ControlTransport, DataPlane

HEAD_GRACE = 3.0
"""Seconds that a rank which its launcher has signalled waits for the head's Stop."""
_DRIVER_GRACE = 2.0
"""Seconds that a driver has to end after a signal."""
_REMOTE_GRACE = _DRIVER_GRACE + 0.5
_TEMPLATE_TIME = 3.0
_SWEEP_TIME = 2.0
_POLL_INTERVAL = 0.002


class DriverChild:
    """A Python process that runs the user's program; stdin, stdout and stderr are this process's.

    Attributes:
        pid: its process id.
        code: its exit code as a shell would give it (128 + n for signal n); None while it runs.
    """

    def __init__(self, command: Sequence[str], session_dir: str, moved: PathRelocation) -> None:
        """Start it.

        Args:
            command: what follows the interpreter: `["script.py", "arg"]`, `["-m", "module"]`, `["-c", "code"]`.
            session_dir: where `hpcray.init()` in it attaches.
            moved: the directories of which it uses copies on this node.
        """
        environ = dict(os.environ)
        strip_launcher_variables(environ)
        environ[ADDRESS] = session_dir
        environ.pop(TERMINAL_SIZE, None)
        moved.set(environ)
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        # subprocess uses vfork and exec here: no Python code runs in a copy of this process, which has MPI open.
        self._child = subprocess.Popen([moved.executable(), *flags, *command], env=environ)
        self.pid = self._child.pid
        self.code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        status = self._child.poll()
        if status is not None and self.code is None:
            self.code = 128 - status if status < 0 else status
        return self.code

    def send(self, number: int) -> None:
        """Send it a signal; nothing happens when it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def forward(self, number: int) -> None:
        """Send it a signal if it has a handler for it; the signal would end it otherwise."""
        if self.poll() is None and handles_signal(self.pid, number):
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send(signal.SIGKILL)

    def shares_terminal(self) -> bool:
        """Return whether a Ctrl-C typed at the terminal reaches it directly."""
        try:
            return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
        except OSError:
            return False


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


class RayletSignals:
    """Turns the signals of a raylet into a drain, into the end of the job, or into signals of its program.

    Args:
        drain: some signals announce the end of the job.
        leads: returns whether this raylet is the head.
        program_is_remote: whether the program is a child of another rank.
        end_job: ends the job on all nodes, with an exit code.
        leave_alone: ends this node without waiting for the others.

    Attributes:
        driver: the program, where it is a child of this process.
    """

    def __init__(
        self,
        loop: EventLoop,
        shutdown: NodeShutdown,
        drain: NodeDrain,
        leads: Callable[[], bool],
        program_is_remote: bool,
        end_job: Callable[[int], None],
        leave_alone: Callable[[int], None],
    ) -> None:
        self.driver: DriverChild | None = None
        self._loop = loop
        self._shutdown = shutdown
        self._drain = drain
        self._leads = leads
        self._program_is_remote = program_is_remote
        self._end_job = end_job
        self._leave_alone = leave_alone
        self._signal = 0

    def own_driver(self, driver: DriverChild) -> None:
        """The program is a child of this process."""
        self.driver = driver
        self._shutdown.watch_driver(driver)

    def user_signalled(self, number: int, came_up: bool) -> None:
        """Handle SIGUSR1 or SIGUSR2: it announces the end of the job, or is for the program."""
        if came_up and not self._shutdown.begun and self._drain.signalled(number, self.driver):
            return
        if self.driver is not None:
            self.driver.forward(number)

    def signalled(self, number: int, came_up: bool) -> None:
        """Handle SIGINT or SIGTERM, while the node does not end."""
        driver, now = self.driver, self._loop.now
        if came_up and self._drain.signalled(number, self.driver):
            if not self._leads():
                self._loop.call_at(now + HEAD_GRACE, self._check_drain)
            return
        repeated = self._signal != 0
        self._signal = number
        if driver is not None and not repeated:
            if number != signal.SIGINT or not driver.shares_terminal():
                driver.send(number)
            self._loop.call_at(now + _DRIVER_GRACE, self._end)
        elif self._leads() or driver is not None:
            # A launcher signals all ranks: a program on another node gets its time to end too.
            self._loop.call_at(now + (_REMOTE_GRACE if self._program_is_remote and not repeated else 0.0), self._end)
        elif number == signal.SIGTERM:
            self._loop.call_at(now + HEAD_GRACE, lambda: self._leave_alone(1))

    def _check_drain(self) -> None:
        if not self._drain.announced:
            self._leave_alone(1)

    def _end(self) -> None:
        if self._shutdown.begun:
            return
        self._end_job(128 + self._signal)
        if self.driver is not None:
            self.driver.kill()
        if not self._leads():
            self._loop.call_at(self._loop.now + HEAD_GRACE, lambda: self._leave_alone(1))


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
        os._exit(code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def forget_node(raylet: Raylet, control: ControlTransport | None, data: DataPlane | None, died: m.NodeDied) -> None:
    """Report a dead node to the cores, transports and processes of this node; once, as a new head repeats it."""
    node, reason, now = died.node, died.reason, raylet.loop.now
    if node in raylet.forgotten_nodes:
        return
    raylet.forgotten_nodes.add(node)
    raylet.neighbor_dirs.pop(node, None)
    raylet.loop.last_heard.pop(node, None)
    raylet.router.lose_node(node, reason, died.kept_at)
    if raylet.head is not None:
        raylet.apply(raylet.head.node_died(now, node, reason))
    raylet.apply(raylet.lease_manager.node_died(now, node))
    # Cancels receives, so before the transports forget the node.
    raylet.apply(raylet.store.node_died(now, node, raylet.router.neighbor_links))
    raylet.introspection.figures.node_died(now, node)
    if control is not None:
        control.forget(node, reason)
    if data is not None:
        data.forget(node, reason)
    for proc in raylet.router.links:
        raylet.router.send(proc, died)
