"""Signals to a raylet: each is a drain, the end of the job, or for the program."""

from __future__ import annotations

import signal
from collections.abc import Callable

from hpcray.runtime.node.driver_child import DriverChild
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
