"""Signals to a raylet: each is a drain, the end of the job, or for the program."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the signals of a start are set before the template of workers is forked
    from hpcray.runtime.node.child_process import DriverChild
    from hpcray.runtime.node.node_drain import NodeDrain
    from hpcray.runtime.node.shutdown import NodeShutdown
    from hpcray.runtime.raylet.event_loop import EventLoop

HEAD_GRACE = 3.0
"""Seconds that a rank which its launcher has signalled waits for the head's Stop."""
_DRIVER_GRACE = 2.0
"""Seconds that a driver has to end after a signal."""
_REMOTE_GRACE = _DRIVER_GRACE + 0.5


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


# ------------------------------------------------------------ node signals
# The signals of a raylet process: while it starts, and while its node runs.


USER_SIGNALS = frozenset({signal.SIGUSR1, signal.SIGUSR2})
_MAY_BE_IGNORED = USER_SIGNALS | {signal.SIGHUP}


@contextmanager
def leaving_at_sigterm() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit(143), so that what was made is removed. For a start that Python code does."""
    watched = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def leave(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        raise SystemExit(128 + signal.SIGTERM)

    if watched:
        signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if watched and signal.getsignal(signal.SIGTERM) is leave:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def ended_by_sigterm(tidy_up: Callable[[], object]) -> Iterator[None]:
    """Inside, SIGTERM ends this process after `tidy_up()`, with exit code 143; from a thread, since the main thread may
    be inside of MPI, where Python handles no signal.

    The template process would tidy up too, but it may still be importing, and Slurm kills it a moment after the rank.
    """
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(write, False)
    watched = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if watched:
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(read, watched, tidy_up), name="hpcray-early-end", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write)
        thread.join()
        os.close(read)
        if watched:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _watch(fd: int, watched: bool, tidy_up: Callable[[], object]) -> None:
    while numbers := os.read(fd, 4096):
        if watched and signal.SIGTERM in numbers:
            tidy_up()
            os._exit(128 + signal.SIGTERM)


def outlive_user_signals() -> None:
    """Ignore the signals that launchers and batch systems send to all ranks: they would end this process."""
    for number in USER_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _ignore)


@contextmanager
def signals() -> Iterator[int]:
    """Yield a descriptor on which the signals of a raylet arrive as bytes."""
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    handled = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, *USER_SIGNALS}
    # Under nohup a job goes on without its terminal; UCX uses SIGHUP for its own purposes.
    ignored = {number for number in handled & _MAY_BE_IGNORED if signal.getsignal(number) is signal.SIG_IGN}
    handlers = {number: signal.SIG_IGN if number in ignored else _ignore for number in handled}
    old = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield read
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


def _ignore(number: int, frame: object) -> None:
    """Handle nothing; the driver would inherit SIG_IGN."""
