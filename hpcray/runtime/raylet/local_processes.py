"""The processes that are connected to a raylet: those of its node, and those of neighboring nodes."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterable
from typing import Protocol

from msgspec import Struct

from hpcray.common.config import Config
from hpcray.common.ids import HEAD, NIL_PROC, node_of, number_of
from hpcray.core import effects as fx
from hpcray.core.gcs.garbage_collection import Throttler
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.core.raylet.worker_pool import WorkerPool
from hpcray.platform.fork_server import ForkServerClient
from hpcray.platform.process_tree import NO_THREAD, describe_exit
from hpcray.platform.resource_limits import free_connections, raise_open_file_limit
from hpcray.protocol import messages as m
from hpcray.protocol.messages import ATTACHED, DRIVER, WORKER, Exit, Hello, NodeInfo, Welcome
from hpcray.runtime.raylet.event_loop import EventLoop
from hpcray.runtime.raylet.local_sockets import LocalListener, LocalSocket
from hpcray.runtime.raylet.router import Router

_REPORT_GRACE = 1.0
"""Seconds that a worker which closed its connection has to end before it is killed."""
_LAST_WORDS = 0.25  # seconds from the request to a worker that is not needed any more to its SIGKILL
_REFUSAL_REPORT_INTERVAL = 10.0


class NodeContext(Struct):
    """The facts about one node that its raylet and the parts of it share.

    Attributes:
        info: the node's row in the head's node table.
        cluster_size: number of nodes, those that have died included. It grows when nodes join the running job.
        session_dir: its session directory.
        config: its settings.
        driver_rank: the node that runs the program.
        reserve: bytes behind the objects in its arena.
    """

    info: NodeInfo
    cluster_size: int
    session_dir: str
    config: Config
    driver_rank: int = 0
    reserve: int = 0


class ProcessEvents(Protocol):
    """The members of the raylet that `LocalProcesses` and `NeighborClients` use."""

    neighbor_dirs: dict[int, str]
    forgotten_nodes: set[int]

    def new_number(self) -> int:
        """Return a process number for a driver."""

    def proc_of(self, number: int) -> bytes:
        """Return the id of the process of this node that has this number."""

    def welcome(self, proc: bytes) -> Welcome:
        """Return the reply to the Hello of a process."""

    def joined(self, proc: bytes, kind: str, pid: int) -> None:
        """A process of this node was welcomed."""

    def died(self, proc: bytes, kind: str, reason: str, peers: set[bytes]) -> None:
        """A process is gone; `peers`: processes and raylets it exchanged frames with through this raylet."""

    def stopping(self, code: int) -> None:
        """The processes of this node are about to be asked to leave."""

    def leaving(self, proc: bytes) -> None:
        """A process is about to be asked to leave."""

    def explain_sigkill(self) -> str:
        """Return why a worker may have got a SIGKILL that this raylet did not send; "" if that is not known."""

    def apply(self, effects: Iterable[fx.Effect]) -> None:
        """Carry out effects of the store."""

    def fork_failed(self, number: int, reason: str) -> None:
        """A worker could not be forked."""

    def template_broken(self, reason: str) -> None:
        """The template process lives, but cannot fork workers."""

    def preloaded(self, module: str, problem: str) -> None:
        """The template process has imported a module ahead of the workers. problem: why it could not; "": it has."""

    def template_gone(self, reason: str) -> None:
        """The template process has ended."""


class LocalProcesses:
    """Forks through the template, replies to Hello, and reports each death once, with the most specific reason.

    Args:
        before_fork: called before a worker is forked: it needs the session directory.

    Attributes:
        stopping: the job is over; nothing is forked any more.
    """

    def __init__(
        self,
        node: int,
        template: ForkServerClient,
        loop: EventLoop,
        router: Router,
        arena_fd: int,
        events: ProcessEvents,
        before_fork: Callable[[], None] = lambda: None,
    ) -> None:
        self._node = node
        self._template = template
        self._before_fork = before_fork
        self._loop = loop
        self._router = router
        self._arena_fd = arena_fd
        self._events = events
        self._numbers: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._early: dict[int, LocalSocket] = {}
        self._workers: set[int] = set()
        self._killed: dict[int, str] = {}
        self._driver_pid = 0
        self.stopping = False
        loop.watch(template.fileno(), self._template_ready)

    @property
    def workers(self) -> int:
        """The number of workers that were requested and are not known to be dead."""
        return len(self._workers)

    def expect_driver(self, pid: int) -> None:
        """The process with this pid is the job's driver, whatever kind its Hello names."""
        self._driver_pid = pid

    def fork(self, number: int, env: tuple[tuple[str, str], ...]) -> None:
        """Request a worker; does nothing when the job is over."""
        if not self.stopping:
            self._before_fork()  # it may find that this node has to end
        if self.stopping:
            return
        self._workers.add(number)
        self._template.fork(number, env)
        self._watch_template()
        self._take_reports()  # a request that cannot be sent fails at once

    def preload(self, modules: tuple[str, ...], env: tuple[tuple[str, str], ...]) -> None:
        """Have modules imported before the next worker is forked. env: variables that they need."""
        self._template.prepare((), modules, env)
        self._watch_template()

    def kill(self, proc: bytes, reason: str = "") -> None:
        """Send SIGKILL to a worker. reason: of its death; "": its work is not needed any more, and it has a moment
        in which to say what it has run."""
        if not reason and proc in self._router.links:
            self._ask_to_leave(proc, 1)
            self._loop.call_at(self._loop.now + _LAST_WORDS, lambda: self._kill(number_of(proc), ""))
        else:
            self._kill(number_of(proc), reason)

    def ask_to_leave(self, code: int) -> None:
        """Send Exit to every process, also to those that connect later."""
        self.stopping = True
        self._events.stopping(code)
        for proc in self._router.links:
            self._ask_to_leave(proc, code)

    def hello(self, link: LocalSocket, hello: Hello) -> None:
        """Handle the first message of a new connection."""
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

    def link_closed(self, link: LocalSocket, reason: str) -> None:
        """The connection of a process closed."""
        self._early.pop(link.pid, None)
        if link.proc == NIL_PROC or self._router.links.get(link.proc) is not link:
            return
        number = number_of(link.proc)
        if link.kind != WORKER:
            self._report_death(link.proc, link.kind, reason, link.peers)
        elif number in self._workers:
            link.closing = True
            self._loop.call_at(self._loop.now + _REPORT_GRACE, lambda: self._kill(number, reason))

    def stop_template(self) -> None:
        """Have the template kill the processes that are left, clean up and end."""
        self._template.stop()
        self._watch_template()

    # ------------------------------------------------------------ births

    def _welcome(self, link: LocalSocket, number: int) -> None:
        proc = self._events.proc_of(number)
        link.proc = proc
        try:
            self._router.welcome(link, self._events.welcome(proc), self._arena_fd)
        except OSError:
            return  # the process has ended; reading its socket will find that
        self._router.links[proc] = link
        self._events.joined(proc, link.kind, link.pid)
        if self.stopping:
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
            elif what == "preloaded":
                self._events.preloaded(*args)
            elif what == "broken":
                self._events.template_broken(f"the template process cannot import what workers need:\n{args[0]}")

    # ------------------------------------------------------------ deaths

    def _exited(self, number: int, status: int, problem: str) -> None:
        self._workers.discard(number)
        del self._numbers[self._pids.pop(number)]
        proc = self._events.proc_of(number)
        link = self._router.links.get(proc)
        if link is not None and not link.closing:
            self._loop.drain(link)
        known = self._killed.pop(number, None)
        if known is None and status == signal.SIGKILL:
            known = self._events.explain_sigkill() or None
        reason = known if known is not None and status == signal.SIGKILL else describe_exit(status)
        if link is None and problem:
            reason = f"{reason}: {problem}"
        if link is None and os.waitstatus_to_exitcode(status) == NO_THREAD:
            reason = "it could not start a thread; hint: ulimit -u, or the cgroup's pids.max"
        self._report_death(proc, WORKER, reason, link.peers if link is not None else set())

    def _ask_to_leave(self, proc: bytes, code: int) -> None:
        self._events.leaving(proc)
        self._router.send(proc, Exit(code))

    def _kill(self, number: int, reason: str) -> None:
        if number in self._workers:
            if reason:
                self._killed.setdefault(number, reason)
            self._template.kill(number)
            self._watch_template()

    def _report_death(self, proc: bytes, kind: str, reason: str, peers: set[bytes]) -> None:
        self._router.forget(proc, reason)
        self._events.died(proc, kind, reason, peers)


class NeighborClients:
    """Processes of neighboring nodes that read in this node's store.

    They open and release objects as the processes of this node do. Their own raylet reports how they end; a closed
    connection is no proof of death. Only when that raylet cannot report any more, since its node is declared dead, does
    a process keep its pins until its connection closes.

    Args:
        arena_fd: of the arena that they map.

    Attributes:
        limit: number of processes that may be connected. The node of a process beyond it pulls the objects instead.
    """

    def __init__(
        self, loop: EventLoop, router: Router, store: ObjectStore, arena_fd: int, events: ProcessEvents
    ) -> None:
        self._loop = loop
        self._router = router
        self._store = store
        self._arena_fd = arena_fd
        self._events = events
        self.limit = 0

    def hello(self, link: LocalSocket) -> None:
        """Welcome a process, or close its connection."""
        proc, links = link.proc, self._router.neighbor_links
        known = number_of(proc) and node_of(proc) in self._events.neighbor_dirs
        if not known or len(links) >= self.limit:
            self._loop.close_link(link)
            return
        try:
            self._router.welcome(link, self._events.welcome(proc), self._arena_fd)
        except OSError:
            self._loop.close_link(link)  # the process has ended, or learns from the closed connection
            return
        links[proc] = link

    def closed(self, link: LocalSocket) -> None:
        """The connection of a process has ended."""
        proc, links = link.proc, self._router.neighbor_links
        if links.get(proc) is link:
            del links[proc]
            if node_of(proc) in self._events.forgotten_nodes:
                self._events.apply(self._store.process_died(self._loop.now, proc))


def share_descriptors(
    log: Callable[[str], None],
    loop: EventLoop,
    pool: WorkerPool,
    neighbor_clients: NeighborClients,
    listener: LocalListener,
    cluster_size: int,
) -> None:
    """Limit workers and neighbors' processes to the file descriptors of the raylet, and report refused connections."""
    files = raise_open_file_limit()
    room = free_connections(files)
    # Other nodes may turn out to be neighbors, whose processes want to read here.
    most = room - 1 if cluster_size == 1 else (room - 1) * 3 // 4
    if most < pool.limit:
        pool.set_limit(max(1, most), f", as its raylet may have {files} open files; hint: raise ulimit -n")
    neighbor_clients.limit = max(0, room - 1 - pool.limit)
    reported_at = -_REFUSAL_REPORT_INTERVAL

    def report_refusal() -> None:
        nonlocal reported_at
        if loop.now - reported_at >= _REFUSAL_REPORT_INTERVAL:
            reported_at = loop.now
            log(f"a process was turned away: no descriptor is left of {files}; hint: raise ulimit -n")

    listener.full_listeners.append(report_refusal)


# ------------------------------------------------------------ garbage collection
# When the processes of one node collect cyclic garbage (`core.gcs.garbage_collection` says why).


_REQUEST_INTERVAL = 1.0
"""Seconds between two requests of one node to the GCS, which collects much less often."""


class NodeGarbageCollection:
    """Has the processes of this node collect: periodically, when its store is full, and when the GCS says so."""

    def __init__(self, config: Config, loop: EventLoop, router: Router) -> None:
        self._loop = loop
        self._router = router
        self._throttler = Throttler(config.gc_min_interval, config.gc_interval, loop.now)
        self._to_gcs = Throttler(_REQUEST_INTERVAL)
        self._shortages = 0

    def note_shortages(self, count: int) -> None:
        """Collect if more requests than before have found no room in the store: the owners of the objects in it may be
        anywhere.

        Args:
            count: such requests so far.
        """
        if count != self._shortages:
            self._shortages = count
            self._throttler.request()
            self._to_gcs.request()
            self.tick()

    def tick(self) -> None:
        """Send the messages that are due."""
        now = self._loop.now
        if self._to_gcs.due(now):
            self._router.send(HEAD, m.RequestGarbageCollection())
        if self._throttler.due(now):
            for proc in self._router.links:
                self._router.send(proc, m.CollectGarbage())

    def on_collect(self, now: float, src: bytes, msg: m.CollectGarbage) -> Iterable[object]:
        """The GCS has all processes of the job collect."""
        self._throttler.request()
        self.tick()
        return ()
