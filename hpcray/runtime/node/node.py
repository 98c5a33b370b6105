"""One node, from its connections to other nodes to its end: transports, raylet, and clean-up. What comes before is
`prepared_node`."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from msgspec import Struct

from hpcray.common.exceptions import StartupError
from hpcray.common.job_names import logs_directory
from hpcray.common.labels import labels_of_environment, parse_labels
from hpcray.core.gcs.gcs import Gcs
from hpcray.core.gcs.node_manager import NO_NODE, HeadFailureDetector, NodeManager
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.core.raylet.local_lease_manager import LocalLeaseManager
from hpcray.platform.accelerators import accelerator_resources, gpu_type
from hpcray.platform.allocation import read_allocation
from hpcray.platform.arena import Prefaulter
from hpcray.platform.config_files import launch_config
from hpcray.platform.console import ExitReport, silenced_output, write_exit_report
from hpcray.platform.fork_server import ForkServerClient
from hpcray.platform.journal_file import JournalFile
from hpcray.platform.launcher_environment import set_mpi_variables, set_preferred_adapters
from hpcray.platform.mpi_directory import mark_up, private_memory
from hpcray.platform.numa_binding import original_affinity
from hpcray.platform.process_tree import ProcessIdentity
from hpcray.platform.resource_limits import free_connections, raise_open_file_limit
from hpcray.platform.session_directory import SessionDirectory, SessionError, node_logs
from hpcray.platform.sockets import node_ip_address
from hpcray.platform.spill_files import SpillFiles
from hpcray.protocol.messages import NodeInfo
from hpcray.runtime.node.child_process import ChildProcess, DriverChild, export_metrics, show_progress
from hpcray.runtime.node.cluster_member import ClusterMember
from hpcray.runtime.node.head_failover import NEW_HEAD_TIMEOUT, check_journal, open_journal
from hpcray.runtime.node.joining import join_job
from hpcray.runtime.node.node_features import NodeFeatures, NodeParts
from hpcray.runtime.node.node_transports import NodeTransports
from hpcray.runtime.node.options import NODE_ID_BYTES, total_resources
from hpcray.runtime.node.prepared_node import TRANSFER_SLOTS, PreparedNode
from hpcray.runtime.node.raylet_signals import USER_SIGNALS, signals
from hpcray.runtime.node.shutdown import NodeShutdown, watchdog
from hpcray.runtime.node.slurm_job import end_step, reported_by_launcher, requeue_job
from hpcray.runtime.raylet.event_loop import EventLoop
from hpcray.runtime.raylet.local_processes import LocalProcesses, NeighborClients, NodeContext, share_descriptors
from hpcray.runtime.raylet.local_sockets import LocalListener
from hpcray.runtime.raylet.log_monitor import LogMonitor
from hpcray.runtime.raylet.memory_monitor import MemoryMonitor
from hpcray.runtime.raylet.raylet import Raylet, SpillIo
from hpcray.runtime.raylet.router import FrameSlotRouter, HeadLocation, Router
from hpcray.transport.base import ControlTransport, DataPlane, StartError, TransportError
from hpcray.transport.startup import Launch, few_cores, several_tasks, threads_of_a_core

_FINALIZE_TIME = 3.0
_MIN_CONNECTIONS = 2


class _Place(Struct, frozen=True):
    """The place of a node in its job: its number, the number of nodes as far as it knows, the node that runs the
    program, the node of rank 0 of its world, and the head's node with the number of its moves."""

    rank: int
    size: int
    driver_rank: int
    world: int = 0
    head: int = 0
    head_epoch: int = 0


class OpenNode(Struct, frozen=True):
    """A prepared node that is open to its processes and to other nodes."""

    listener: LocalListener
    transports: NodeTransports
    place: _Place


class _Outcome(Struct):
    """How the loop ended. `failure`: why the cluster never came up. `broken`: MPI cannot be left in good order.
    `requeue`: the batch system is to run the job again. `decides`: the code is the job's."""

    code: int
    broken: bool
    failure: str
    requeue: bool = False
    decides: bool = False


def open_node(node: PreparedNode, features: NodeFeatures) -> OpenNode:
    """Open the socket and the transports of a prepared node.

    Raises:
        StartupError: the transports cannot be opened, or the journal cannot be used.
    """
    if node.token is None:
        try:
            check_journal(node.config, os.environ, node.launch.rank)
        except StartupError as error:
            raise reported_by_launcher(error, node.launch) from None
    listener = LocalListener(node.session.socket_path(0))
    try:
        transports, place = _open_transports(node)
        _prepare_workers(node, transports.control, features)
        _require_open_files()
    except BaseException:
        listener.close()
        raise
    return OpenNode(listener, transports, place)


def serve(
    node: PreparedNode,
    opened: OpenNode,
    ready: Callable[[str], None],
    life: int,
    features: NodeFeatures,
    report_code: Callable[[int], int],
) -> int:
    """Run the raylet of an open node until the job is over. Other arguments, result and errors: as of `run_node`.

    Args:
        features: of raylets.
    """
    with signals() as wakeup:
        outcome = _NodeServer(node, opened, ready, life, features).run(wakeup, life)
    control, data = opened.transports.control, opened.transports.data
    if outcome.requeue and (trouble := requeue_job(node.config)):
        print(f"hpcray: the job was not put back into the queue: {trouble}", file=sys.stderr, flush=True)
    code = report_code(outcome.code) if outcome.decides and not outcome.failure else outcome.code
    if control is not None and data is not None:
        # Peers leave at the same time, and UCX calls that an error, on standard output.
        deadline = watchdog(_FINALIZE_TIME + node.removal_time, outcome.failure, code)
        with deadline, silenced_output(not outcome.failure):
            data.close()
            control.close(abort=outcome.broken)
    if outcome.failure:
        raise StartupError(outcome.failure)
    return code


def _require_open_files() -> None:
    """Raise the limit of open files as far as it goes. Call it when the transports are open.

    Raises:
        StartupError: not even a driver and a worker could connect.
    """
    files = raise_open_file_limit()
    if free_connections(files) < _MIN_CONNECTIONS:
        raise StartupError(
            f"this node's raylet may have {files} open files, too few for a driver and a worker (RLIMIT_NOFILE); "
            "hint: ulimit -n 4096"
        )


def _warn_of_odd_starts(launch: Launch) -> None:
    """Print on rank 0 what works, but is hardly what was meant."""
    if launch.rank != 0 or launch.kind != "srun":
        return
    cores = few_cores(launch, read_allocation().cpus_meant, os.sched_getaffinity(0), threads_of_a_core())
    for text in filter(None, (several_tasks(launch), cores)):
        print(f"hpcray: {text}", file=sys.stderr, flush=True)


def _open_transports(node: PreparedNode) -> tuple[NodeTransports, _Place]:
    """Open what connects this node to others, and find its place among them."""
    _warn_of_odd_starts(node.launch)
    if node.launch.size == 1:
        return _connect(node)
    set_mpi_variables(os.environ, node.launch.kind == "srun")
    with private_memory(os.environ):
        return _connect(node)


def _connect(node: PreparedNode) -> tuple[NodeTransports, _Place]:
    try:
        if node.token is not None:
            outer, plane, admitted = join_job(node.token, node.config, node.launch, node.arena)
            number, world = admitted.number, admitted.number - node.launch.rank
            place = _Place(number, number + 1, admitted.driver_rank, world, admitted.head, admitted.epoch)
            return NodeTransports(outer, plane, node.arena), place
        control, data = _open_world(node)
    except StartError as error:
        if error.reported_by == "rank0":
            raise StartupError(str(error), reported_by="rank0") from None
        if (node.launch.rank or error.others_wait) and end_step(node.launch, error):
            raise StartupError(str(error), reported_by="launcher") from error
        raise StartupError(str(error)) from error
    except TransportError as error:
        raise StartupError(str(error)) from error
    rank, size = (control.rank, control.size) if control is not None else (0, 1)
    driver_rank = NO_NODE if node.options.no_program else node.config.driver_rank if size > 1 else 0
    return NodeTransports(control, data, node.arena, node.config.elastic or bool(node.config.max_nodes)), _Place(
        rank, size, driver_rank
    )


def _open_world(node: PreparedNode) -> tuple[ControlTransport | None, DataPlane | None]:
    if node.launch.size == 1:
        return None, None
    # Not imported before: an embedded node needs neither MPI nor UCX.
    from hpcray.transport.selection import offers, open_transports

    if devices := launch_config(os.environ).network_devices:
        set_preferred_adapters(os.environ, devices)  # of the site or the user: where UCX has them not, it says so
    elif node.bound.adapters and offers(node.bound.adapters):
        set_preferred_adapters(os.environ, node.bound.adapters)
    control, data = open_transports(node.config)
    data.register(node.arena.view(0, node.arena.whole), node.arena.view)
    return control, data


def _prepare_workers(node: PreparedNode, control: ControlTransport | None, features: NodeFeatures) -> None:
    """Copy directories and preload modules, before the first worker is forked."""
    options = node.options
    if options.broadcast_env:
        timeout = node.config.start_timeout
        node.moved = features.share_directory(
            options.broadcast_env, options.driver, control, node.session.path, timeout
        )
    modules = [name for name in node.config.preload.split(",") if name]
    node.template.prepare(node.moved.pairs, modules)


class _NodeServer:
    """Composes the raylet of a prepared node, and runs its loop until the node has ended."""

    def __init__(
        self, node: PreparedNode, opened: OpenNode, ready: Callable[[str], None], life_fd: int, features: NodeFeatures
    ) -> None:
        config, transports, place = node.config, opened.transports, opened.place
        control, data = transports.control, transports.data
        self._node = node
        self._observers: list[ChildProcess] = []
        self._listener = opened.listener
        self._journal: JournalFile | None = None
        self._ready = ready
        self._features = features
        self._rank, size = place.rank, place.size
        self._driver_rank = place.driver_rank
        info = _describe_node(node, place, data, features)
        self._context = NodeContext(info, size, node.session.path, config, self._driver_rank, node.arena.reserve)
        self._router = Router(self._rank, size, control, HeadLocation(place.head, place.head_epoch))
        self._loop = EventLoop(self._router, self._listener, control, data, config.spin)
        self._prefault = Prefaulter(node.arena)
        head = Gcs(config, features.near_sets) if self._rank == 0 else None
        lease_manager = LocalLeaseManager(self._rank, info.total, size, config, node.gpus, node.accelerators)
        spill = config.spill_threshold
        self._spill_files = SpillFiles(
            node.spill_dir, node.arena, self._log, config.disk_capacity_threshold, self._report_error
        )
        overflow = self._spill_files.overflow_size if spill else 0
        store = ObjectStore(
            self._rank,
            node.arena.size,
            spill_threshold=spill,
            chunk=config.chunk,
            slots=TRANSFER_SLOTS,
            overflow=overflow,
        )
        self._raylet = Raylet(self._context, self._loop, self._router, lease_manager, store, head, self._prefault, data)
        transports.attach(self._raylet)
        self._attach_parts(transports)
        self._shutdown = NodeShutdown(
            self._loop,
            self._raylet.processes,
            node.template,
            node.session,
            config.stop_timeout,
            lambda: self._cluster.processes_ended(),
            node.removal_time,
        )
        leads = self._rank == 0
        self._cluster = ClusterMember(
            self._raylet,
            self._shutdown,
            node.session,
            node.template.pid,
            self._processes_to_watch(life_fd),
            _first_node_manager(node, place, self._loop.now) if leads else None,
            None if leads else HeadFailureDetector(self._rank, config),
            transports,
            self._up,
            self._open_journal,
            features,
            program_is_remote=bool(node.options.driver) and self._rank != self._driver_rank,
        )
        self._raylet.start(self._cluster, self._cluster.handlers(), self._cluster.effect_handlers())
        made = [make(self._raylet) for make in features.extensions]
        self._raylet.events.extensions = [extension for extension in made if extension is not None]

    def _log(self, text: str) -> None:
        self._raylet.log(text)

    def _report_error(self, text: str) -> None:
        self._raylet.events.report("ERROR", text)

    def _attach_parts(self, transports: NodeTransports) -> None:
        node, raylet, loop, router = self._node, self._raylet, self._loop, self._router
        router.head_location.listeners.append(self._head_moved)
        context, lease_manager, store = self._context, raylet.lease_manager, raylet.store
        logs = logs_directory(context.session_dir)
        kept = node.options.logs or (node_logs(node.config.log_dir, self._rank) if node.config.log_dir else "")
        log_monitor = LogMonitor(
            loop,
            router,
            logs,
            kept,
            lambda: lease_manager.job.driver if lease_manager.job is not None else b"",
            raylet.log,
        )
        copies = [copy for _, copy in node.moved.pairs]
        session_watch = SessionWatch(
            loop,
            node.session,
            node.template,
            log_monitor,
            copies,
            raylet.log,
            lambda reason: self._cluster.give_up(reason),
            lambda: self._shutdown.begun,
        )
        processes = LocalProcesses(self._rank, node.template, loop, router, node.arena.fd, raylet, session_watch.check)
        neighbors = NeighborClients(loop, router, store, node.arena.fd, raylet)
        memory_monitor = MemoryMonitor(
            context, loop, router, processes, lease_manager.pool, store, raylet.log,
            lambda proc: raylet.apply(lease_manager.ask_worker_to_leave(loop.now, proc)),
        )  # fmt: skip
        share_descriptors(raylet.log, loop, lease_manager.pool, neighbors, self._listener, context.cluster_size)
        parts = NodeParts(
            context, loop, router, lease_manager, store, memory_monitor, raylet.head, raylet.events,
            node.template.pid, node.config.chunk, TRANSFER_SLOTS,
            self._spill_files.overflow_size if node.config.spill_threshold else 0,
        )  # fmt: skip
        introspection = self._features.diagnostics(parts)
        spill_io = SpillIo(raylet, self._spill_files)
        frames = FrameSlotRouter(node.arena, node.frame_slots, router)
        loop.share_frames(frames)
        transports.receive_into(frames)
        raylet.attach(processes, neighbors, spill_io, memory_monitor, introspection, log_monitor, frames)

    def _processes_to_watch(self, life_fd: int) -> list[ProcessIdentity]:
        pids = [] if self._node.options.outlives else [os.getpid()]
        if self._node.options.distributed and life_fd >= 0:
            # This process is a rank's child. Where the launcher is killed, nothing else ends the rank, which may sleep.
            pids.append(os.getppid())
            self._node.template.watch_driver(os.getppid())
        return [found for pid in pids if (found := ProcessIdentity.of(pid)) is not None]

    def _up(self) -> None:
        node = self._node
        if node.launch.rank == 0:
            mark_up(os.environ)
        if node.token is not None or self._driver_rank == NO_NODE:
            self._cluster.departure.await_end(node.run.drain_at)
        if node.options.driver and self._rank == self._driver_rank:
            with original_affinity(node.bound.mask):
                driver = DriverChild(node.options.driver, node.session.path, node.moved)
            node.template.watch_driver(driver.pid)
            self._raylet.processes.expect_driver(driver.pid)
            progress = show_progress(node.session.path) if node.options.progress else None
            self._observers += [progress] if progress is not None else []
            self._cluster.own_driver(driver, progress)
        if node.config.metrics_export:
            self._observers.append(export_metrics(node.config.metrics_export, node.session.path))
        self._ready(node.session.path)

    def _head_moved(self) -> None:
        """This node has the program and is the head from now on: what the old head believes does not count."""
        if self._rank == self._driver_rank == self._router.head_location.node:
            self._report_end(None)

    def _report_end(self, code: int | None, believed: bool = False) -> None:
        """Report to a launcher on another host how the program has ended, or that it has not."""
        if path := self._node.exit_file:
            config = self._context.config
            patience = config.head_timeout + config.node_timeout + NEW_HEAD_TIMEOUT if believed else 0.0
            epoch = self._router.head_location.epoch
            write_exit_report(path, ExitReport(self._rank, epoch, code, patience), believed)

    def _open_journal(self) -> JournalFile | None:
        self._journal = open_journal(self._node.config, os.environ, self._raylet.log)
        return self._journal

    def run(self, wakeup_fd: int, life_fd: int) -> _Outcome:
        """Run the loop. wakeup_fd: signals arrive on it. life_fd: see `run_node`."""
        node, cluster, loop, shutdown = self._node, self._cluster, self._loop, self._shutdown
        loop.watch(wakeup_fd, lambda event: _read_signals(wakeup_fd, cluster))
        if life_fd >= 0:
            loop.watch(life_fd, lambda event: _end_of_life(loop, life_fd, cluster.parent_gone))
        try:
            cluster.join()
            loop.run(self._raylet)
        finally:
            self._prefault.stop()
            for child in self._observers:
                child.stop()
            cluster.close()
            self._raylet.events.inform(lambda extension: extension.close())
            loop.close()
            self._raylet.spill_io.close()
            node.template.close()
            node.session.remove()
            if self._journal is not None:
                over = cluster.came_up and shutdown.begun and not cluster.fenced
                self._journal.close(remove=over and not (shutdown.code or cluster.drain.requeue))
        failure = cluster.failure
        if not cluster.came_up:
            failure = failure or "the job was stopped before it was up; hint: see what rank 0 printed"
            return _Outcome(1, cluster.broken, failure)
        decides = (self._rank == self._driver_rank and not cluster.fenced) or cluster.program_lost
        code = shutdown.code if decides else 0
        if decides and (cluster.broken or self._router.head_location.epoch):
            self._report_end(code or int(bool(failure)), cluster.program_lost)
        return _Outcome(code or int(bool(failure)), cluster.broken, "", cluster.drain.requeue, decides)


def _first_node_manager(node: PreparedNode, place: _Place, now: float) -> NodeManager:
    session = os.urandom(8).hex()
    return NodeManager(place.size, session, node.config, now, run=node.run, driver_rank=place.driver_rank)


def _describe_node(node: PreparedNode, place: _Place, data: DataPlane | None, features: NodeFeatures) -> NodeInfo:
    address, config, rank = node_ip_address(), node.config, place.rank
    found = features.labels(config, max(1, node.launch.here), node.gpus, node.token is not None)
    return NodeInfo(
        index=rank,
        node_id=node.options.node_id or os.urandom(NODE_ID_BYTES).hex(),
        host=socket.gethostname(),
        address=address,
        pid=os.getpid(),
        total=total_resources(
            node.options,
            address,
            rank,
            max(1, node.launch.here),
            node.arena.size,
            len(node.gpus),
            gpu_type() if node.gpus else "",
            accelerator_resources(node.accelerators, os.environ),
        ),
        data_address=data.address() if data is not None else b"",
        data_plane=data.name if data is not None else "",
        arena_size=node.arena.size,
        labels={**found, **labels_of_environment(os.environ), **parse_labels(config.labels)},
        session_dir=node.session.path if config.same_host else "",
        name=node.options.node_name,
        joined=node.token is not None,
        world=place.world,
        instance=node.options.instance,
        end=node.run.drain_at if node.token is not None else 0.0,
        note=config.end_note,
    )


def _read_signals(fd: int, cluster: ClusterMember) -> None:
    for number in set(os.read(fd, 4096)):
        if number == signal.SIGCHLD:
            cluster.child_ended()
        elif number in USER_SIGNALS:
            cluster.user_signalled(number)
        elif number == signal.SIGHUP:
            cluster.signalled(signal.SIGTERM)
        else:
            cluster.signalled(number)


def _end_of_life(loop: EventLoop, fd: int, parent_gone: Callable[[], None]) -> None:
    loop.unwatch(fd)
    parent_gone()


# ------------------------------------------------------------ session watch
# The session directory of a running node, made again where a cleaner of temporary files removes it, or some of it.

_PERIOD, _SLACK = 1.0, 0.5
"""Seconds between two looks, and how much later one may come."""
_REPORT_INTERVAL = 60.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_HINT = "hint: HPCRAY_TMPDIR names a directory that nothing cleans"


class SessionWatch:
    """Looks for what was removed: now and then, and before a worker is forked, which needs all of it.

    Sockets of other processes are not made again: who finds none writes through the raylet.

    Args:
        copies: directories in the session directory that workers import from, and that cannot be made again.
        log: writes a line about this node.
        give_up: ends this node, with the reason.
        ending: whether the node ends, and its directory with it.
    """

    def __init__(
        self,
        loop: EventLoop,
        session: SessionDirectory,
        template: ForkServerClient,
        logs: LogMonitor,
        copies: Sequence[str],
        log: Callable[[str], None],
        give_up: Callable[[str], None],
        ending: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._session = session
        self._template = template
        self._logs = logs
        self._copies = copies
        self._log = log
        self._give_up = give_up
        self._reported_at = -_REPORT_INTERVAL
        self._ending = ending
        loop.call_at(loop.now + _PERIOD, self._look, _SLACK)

    def _look(self) -> None:
        if not self._ending():
            self.check()
            self._loop.call_at(self._loop.now + _PERIOD, self._look, _SLACK)

    def check(self) -> None:
        """Make again what is missing; end the node where that cannot be done."""
        missing = self._session.missing()
        try:
            if missing:
                self._restore(missing)
            elif self._logs.restore():
                missing = [f"{self._session.path}/logs"]
        except (OSError, SessionError) as error:
            what = missing[0] if missing else f"{self._session.path}/logs"
            if getattr(error, "errno", 0) in _FULL:
                self._report(f"{what} was removed, and cannot be made again yet: {error}; hint: make room there")
                return
            self._give_up(f"{what} was removed, and cannot be made again, so this node ends: {error}; {_HINT}")
            return
        if missing:
            self._report(f"{missing[0]} was removed while the job runs, and is made again; {_HINT}")

    def _restore(self, missing: Sequence[str]) -> None:
        if gone := next((path for path in self._copies if not os.path.isdir(path)), ""):
            raise SessionError(f"{gone} was a copy that workers import from")
        self._session.restore()
        self._template.lock_session()
        if not os.path.lexists(path := self._session.socket_path(0)):
            self._loop.listen_at(path)
        self._logs.restore()

    def _report(self, text: str) -> None:
        if self._loop.now - self._reported_at >= _REPORT_INTERVAL:
            self._reported_at = self._loop.now
            self._log(text)
