"""What the signals of a raylet do to the job and to its program."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpcray.runtime.drain import Drain
from hpcray.runtime.driver_child import DriverChild
from hpcray.runtime.leaving import Leaving
from hpcray.runtime.raylet_loop import RayletLoop

USER_SIGNALS = frozenset({signal.SIGUSR1, signal.SIGUSR2})
HEAD_GRACE = 3.0
"""A rank that was told to end by its launcher waits this long for the head's word."""
_MAY_BE_IGNORED = USER_SIGNALS | {signal.SIGHUP}
_DRIVER_GRACE = 2.0
"""A driver that was sent a signal has this long to end."""
_FAR_GRACE = _DRIVER_GRACE + 0.5


class Signals:
    """Of one raylet.

    Args:
        drain: some signals announce the end of the job.
        leads: whether this raylet is the head now.
        program_is_far: the program is a child of another rank.
        end_job: ends the job on all nodes, with an exit code.
        leave_alone: has this node leave without waiting for the others.

    Attributes:
        driver: the program, where it is a child of this process.
    """

    def __init__(
        self,
        loop: RayletLoop,
        leaving: Leaving,
        drain: Drain,
        leads: Callable[[], bool],
        program_is_far: bool,
        end_job: Callable[[int], None],
        leave_alone: Callable[[int], None],
    ) -> None:
        self.driver: DriverChild | None = None
        self._loop = loop
        self._leaving = leaving
        self._drain = drain
        self._leads = leads
        self._program_is_far = program_is_far
        self._end_job = end_job
        self._leave_alone = leave_alone
        self._signal = 0

    def own_driver(self, driver: DriverChild) -> None:
        """The program is a child of this process."""
        self.driver = driver
        self._leaving.watch_driver(driver)

    def user_signalled(self, number: int, came_up: bool) -> None:
        """SIGUSR1 or SIGUSR2: not meant for us, perhaps for the user's program."""
        if came_up and not self._leaving.begun and self._drain.signalled(number, self.driver):
            return
        if self.driver is not None:
            self.driver.pass_on(number)

    def signalled(self, number: int, came_up: bool) -> None:
        """SIGINT or SIGTERM, while the node does not leave."""
        driver, now = self.driver, self._loop.now
        if came_up and self._drain.signalled(number, driver):
            if not self._leads():
                self._loop.call_at(now + HEAD_GRACE, self._check_drain)
            return
        again = self._signal != 0
        self._signal = number
        if driver is not None and not again:
            if number != signal.SIGINT or not driver.shares_terminal():
                driver.send(number)
            self._loop.call_at(now + _DRIVER_GRACE, self._end)
        elif self._leads() or driver is not None:
            # A launcher signals all ranks: the program, on another node, has its time too.
            self._loop.call_at(now + (_FAR_GRACE if self._program_is_far and not again else 0.0), self._end)
        elif number == signal.SIGTERM:
            self._loop.call_at(now + HEAD_GRACE, lambda: self._leave_alone(1))

    def _check_drain(self) -> None:
        if not self._drain.announced:
            self._leave_alone(1)

    def _end(self) -> None:
        if self._leaving.begun:
            return
        self._end_job(128 + self._signal)
        if self.driver is not None:
            self.driver.kill()
        if not self._leads():
            self._loop.call_at(self._loop.now + HEAD_GRACE, lambda: self._leave_alone(1))


def outlive_user_signals() -> None:
    """Launchers and batch systems send these to all ranks, at any time; they would end us."""
    for number in USER_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _ignore)


@contextmanager
def signals() -> Iterator[int]:
    """The signals that mean something to us arrive as bytes on the descriptor that it gives."""
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    ours = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, *USER_SIGNALS}
    # Who starts us under nohup wants us to go on without the terminal; UCX has taken SIGHUP for a use of its own.
    ignored = {number for number in ours & _MAY_BE_IGNORED if signal.getsignal(number) is signal.SIG_IGN}
    handlers = {number: signal.SIG_IGN if number in ignored else _ignore for number in ours}
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
    """A handler, not SIG_IGN, which the driver would inherit."""
