"""The end of one node: ask its processes to leave, then have its template kill what stayed and clean up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from hpcray.host.processes import descendants, kill_descendants
from hpcray.host.session import Session
from hpcray.host.template_link import TemplateLink
from hpcray.runtime.driver_child import DriverChild
from hpcray.runtime.local_processes import LocalProcesses
from hpcray.runtime.raylet import Raylet
from hpcray.runtime.raylet_loop import RayletLoop
from hpcray.transport.base import ControlTransport, DataPlane
from hpcray.wire import messages as m

_TEMPLATE_TIME = 3.0
_SWEEP_TIME = 2.0
_LOOK = 0.002


class Leaving:
    """Runs once, inside the raylet's loop.

    Args:
        extra: seconds that the template may need to remove what is in the session directory, beyond the usual.

    Attributes:
        begun: whether the node is ending.
        code: the job's exit code, once begun.
        extra: as given.
    """

    def __init__(
        self,
        loop: RayletLoop,
        processes: LocalProcesses,
        template: TemplateLink,
        session: Session,
        stop_timeout: float,
        on_gone: Callable[[], None],
        extra: float = 0.0,
    ) -> None:
        self._loop = loop
        self._processes = processes
        self._template = template
        self._session = session
        self._stop_timeout = stop_timeout
        self._on_gone = on_gone
        self.extra = extra
        self._template_time = _TEMPLATE_TIME + extra
        self._driver: DriverChild | None = None
        self._asked_template = False
        self._gone = False
        self.begun = False
        self.code = 0

    def watch_driver(self, driver: DriverChild) -> None:
        """This node has the driver as a child: it must be gone too."""
        self._driver = driver

    def begin(self, code: int, patience: float | None = None) -> None:
        """Start to leave; later calls change nothing.

        Args:
            code: the job's exit code.
            patience: seconds until what has not left is killed; None: `stop_timeout`.
        """
        if self.begun:
            return
        self.begun = True
        self.code = code
        self._processes.ask_to_leave(code)
        if self._driver is not None:
            self._driver.terminate()
        self._loop.call_at(self._loop.now + (self._stop_timeout if patience is None else patience), self._stop_template)
        self.check()

    def check(self) -> None:
        """Something ended: go on when it was the last that we waited for."""
        if self.begun and not self._processes.workers and (self._driver is None or self._driver.poll() is not None):
            self._stop_template()

    def template_gone(self) -> None:
        """The template process has ended. When it was not asked to, its work is done here."""
        if not self._asked_template or os.path.exists(self._session.path):
            self._sweep()
        self._finish()

    # ------------------------------------------------------------ inside

    def _stop_template(self) -> None:
        if self._asked_template or self._gone:
            return
        self._asked_template = True
        if self._driver is not None:
            self._driver.kill()
        self._processes.stop_template()
        self._loop.call_at(self._loop.now + self._template_time, self._template_late)

    def _template_late(self) -> None:
        if not self._gone:
            self._template.kill_template()

    def _sweep(self) -> None:
        """Kill what a dead template left. Its children die with it, and theirs came to us, their next sub-reaper."""
        spared = set()
        if self._driver is not None:
            spared = {self._driver.pid, *descendants(self._driver.pid)}
        deadline = time.monotonic() + _SWEEP_TIME
        while kill_descendants(os.getpid(), spared) and time.monotonic() < deadline:
            time.sleep(_LOOK)
        self._session.remove()

    def _finish(self) -> None:
        if not self._gone:
            self._gone = True
            self._on_gone()


def forget_node(raylet: Raylet, control: ControlTransport | None, data: DataPlane | None, died: m.NodeDied) -> None:
    """A node is dead: tell the cores, the wires, and the processes of this node. Once: a new head says it again."""
    node, reason, now = died.node, died.reason, raylet.loop.now
    if node in raylet.buried:
        return
    raylet.buried.add(node)
    raylet.neighbours.pop(node, None)
    raylet.router.lose_node(node, reason)
    if raylet.head is not None:
        raylet.apply(raylet.head.node_died(now, node, reason))
    raylet.apply(raylet.core.node_died(now, node))
    # It cancels receives, so before the wires forget them.
    raylet.apply(raylet.store.node_died(now, node, raylet.router.guests))
    if control is not None:
        control.forget(node, reason)
    if data is not None:
        data.forget(node, reason)
    for proc in raylet.router.links:
        raylet.router.send(proc, died)
