"""The processes of one node as its raylet sees them: forked, welcomed, dead."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from typing import Protocol

from hpcray.base.ids import NIL_PROC, make_proc, number_of
from hpcray.host.processes import describe_exit
from hpcray.host.template_link import TemplateLink
from hpcray.runtime.early_thread import NO_THREAD
from hpcray.runtime.local_links import ATTACHED, DRIVER, WORKER, Link
from hpcray.runtime.raylet_loop import RayletLoop
from hpcray.runtime.router import Router
from hpcray.wire.messages import Exit, Hello, Welcome

_REPORT_GRACE = 1.0
"""A worker closed its connection: for so long it may still be on its way out before it is killed."""


class ProcessEvents(Protocol):
    """What the raylet wants to know about its node's processes."""

    def new_number(self) -> int:
        """A process number for a driver."""

    def welcome(self, proc: bytes) -> Welcome:
        """The answer to its Hello."""

    def joined(self, proc: bytes, kind: str, pid: int) -> None:
        """It was welcomed."""

    def died(self, proc: bytes, kind: str, reason: str, peers: set[bytes]) -> None:
        """It is gone; `peers` are the processes and raylets it exchanged frames with through this raylet."""

    def fork_failed(self, number: int, reason: str) -> None:
        """A worker could not be forked."""

    def template_broken(self, reason: str) -> None:
        """The template process lives, but cannot fork workers."""

    def template_gone(self, reason: str) -> None:
        """The template process has ended."""


class LocalProcesses:
    """Forks through the template, answers Hello, and tells each death once, with the reason that is known best.

    Attributes:
        leaving: the job is over; nothing is forked any more. why_killed: what is known of a SIGKILL that is not
            ours.
    """

    def __init__(
        self, node: int, template: TemplateLink, loop: RayletLoop, router: Router, arena_fd: int, events: ProcessEvents
    ) -> None:
        self._node = node
        self._template = template
        self._loop = loop
        self._router = router
        self._arena_fd = arena_fd
        self._events = events
        self._numbers: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._early: dict[int, Link] = {}
        self._workers: set[int] = set()
        self._killed: dict[int, str] = {}
        self.why_killed: Callable[[], str] = lambda: ""
        self._driver_pid = 0
        self.leaving = False
        loop.watch(template.fileno(), self._template_ready)

    @property
    def workers(self) -> int:
        """Workers asked for and not known to be dead."""
        return len(self._workers)

    def expect_driver(self, pid: int) -> None:
        """A process with this pid is the job's driver, whatever it says it is."""
        self._driver_pid = pid

    def fork(self, number: int, env: tuple[tuple[str, str], ...]) -> None:
        """Ask for a worker; nothing happens when the job is over."""
        if self.leaving:
            return
        self._workers.add(number)
        self._template.fork(number, env)
        self._watch_template()
        self._take_reports()  # a request that cannot be sent fails at once

    def kill(self, proc: bytes, reason: str = "") -> None:
        """SIGKILL a worker. reason: what its death is put down to; "": the signal."""
        number = number_of(proc)
        if reason and number in self._workers:
            self._killed.setdefault(number, reason)
        self._template.kill(number)
        self._watch_template()

    def ask_to_leave(self, code: int) -> None:
        """Tell every process that the job is over, those that are still to come too."""
        self.leaving = True
        for proc in self._router.links:
            self._router.send(proc, Exit(code))

    def hello(self, link: Link, hello: Hello) -> None:
        """A connection has said who it is."""
        if hello.kind == WORKER:
            if link.pid not in self._numbers:
                self._take_reports()
            number = self._numbers.get(link.pid)
            if number is None:
                self._early[link.pid] = link  # the template's report comes in a moment
            else:
                self._welcome(link, number)
        elif hello.kind in (DRIVER, ATTACHED):
            link.kind = DRIVER if link.pid == self._driver_pid else hello.kind
            self._welcome(link, self._events.new_number())
        else:
            self._loop.close_link(link)

    def link_closed(self, link: Link, reason: str) -> None:
        """The connection of a process closed."""
        self._early.pop(link.pid, None)
        if link.proc == NIL_PROC or self._router.links.get(link.proc) is not link:
            return
        number = number_of(link.proc)
        if link.kind != WORKER:
            self._declare(link.proc, link.kind, reason, link.peers)
        elif number in self._workers:
            link.closing = True
            self._loop.call_at(self._loop.now + _REPORT_GRACE, lambda: self._kill_mute(number, reason))

    def stop_template(self) -> None:
        """Have the template kill what is left, clean up and leave."""
        self._template.stop()
        self._watch_template()

    # ------------------------------------------------------------ births

    def _welcome(self, link: Link, number: int) -> None:
        proc = make_proc(self._node, number)
        link.proc = proc
        try:
            self._router.welcome(link, self._events.welcome(proc), self._arena_fd)
        except OSError:
            return  # it has gone again; its socket tells
        self._router.links[proc] = link
        self._events.joined(proc, link.kind, link.pid)
        if self.leaving:
            self._router.send(proc, Exit(0))

    # ------------------------------------------------------------ the template's reports

    def _watch_template(self) -> None:
        if not self._template.flush():
            self._loop.watch_writable(self._template.fileno(), True)

    def _template_ready(self, event: int) -> None:
        if event & select.EPOLLOUT and self._template.flush():
            self._loop.watch_writable(self._template.fileno(), False)
        self._take_reports()
        if self._template.gone:
            self._loop.unwatch(self._template.fileno())
            status = self._template.reap()
            self._events.template_gone(f"the template process ended with {describe_exit(status)}")

    def _take_reports(self) -> None:
        for what, *args in self._template.reports():
            if what == "forked":
                number, pid = args
                self._numbers[pid] = number
                self._pids[number] = pid
                link = self._early.pop(pid, None)
                if link is not None:
                    self._welcome(link, number)
            elif what == "exited":
                self._exited(*args)
            elif what == "failed":
                number, reason = args
                self._workers.discard(number)
                self._events.fork_failed(number, reason)
            elif what == "broken":
                self._events.template_broken(f"the template process cannot import what workers need:\n{args[0]}")

    # ------------------------------------------------------------ deaths

    def _exited(self, number: int, status: int) -> None:
        self._workers.discard(number)
        del self._numbers[self._pids.pop(number)]
        proc = make_proc(self._node, number)
        link = self._router.links.get(proc)
        if link is not None and not link.closing:
            self._loop.drain(link)
        mute = self._killed.pop(number, None)
        if mute is None and status == signal.SIGKILL:
            mute = self.why_killed() or None
        reason = mute if mute is not None and status == signal.SIGKILL else describe_exit(status)
        if link is None and os.waitstatus_to_exitcode(status) == NO_THREAD:
            reason = "it could not start a thread; hint: ulimit -u, or the cgroup's pids.max"
        self._declare(proc, WORKER, reason, link.peers if link is not None else set())

    def _kill_mute(self, number: int, reason: str) -> None:
        """A worker without a connection is of no use to anybody."""
        if number in self._workers:
            self._killed[number] = reason
            self._template.kill(number)
            self._watch_template()

    def _declare(self, proc: bytes, kind: str, reason: str, peers: set[bytes]) -> None:
        self._router.forget(proc, reason)
        self._events.died(proc, kind, reason, peers)
