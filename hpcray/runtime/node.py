"""One node from start to end: session directory, arena, template process, wires, raylet, and out again."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from hpcray.base.config import Config
from hpcray.base.failures import StartupError
from hpcray.base.labels import parse_labels
from hpcray.core.gcs.head import HeadCore
from hpcray.core.gcs.membership import HeadWatch, Membership
from hpcray.core.raylet import RayletCore
from hpcray.core.store.node_store import NodeStore
from hpcray.host.accelerators import gpu_type, node_gpus
from hpcray.host.address import node_ip_address
from hpcray.host.allocation import read_allocation
from hpcray.host.arena import NO_HUGE_PAGES, Arena, default_arena_size
from hpcray.host.binding import RankPlan, as_started
from hpcray.host.console import silenced
from hpcray.host.exit_file import exit_file, tell
from hpcray.host.journal_file import JournalFile
from hpcray.host.launcher import prefer_adapters, prepare_mpi
from hpcray.host.prefault import Prefaulter
from hpcray.host.processes import Family, adopt_orphans
from hpcray.host.relocation import Relocation
from hpcray.host.session import Session
from hpcray.host.spill_files import SpillFiles, spill_directory
from hpcray.host.template_link import TemplateLink, start_template
from hpcray.host.threads import one_each
from hpcray.runtime.cluster import Cluster
from hpcray.runtime.driver_child import DriverChild
from hpcray.runtime.early_end import ended_by_sigterm
from hpcray.runtime.guests import Guests
from hpcray.runtime.journaling import check_journal, open_journal
from hpcray.runtime.leaving import Leaving
from hpcray.runtime.limits import need_open_files
from hpcray.runtime.local_links import Listener
from hpcray.runtime.local_processes import LocalProcesses
from hpcray.runtime.node_answers import attend
from hpcray.runtime.options import NodeOptions, bind_node, total_resources
from hpcray.runtime.raylet import Raylet, Seat
from hpcray.runtime.raylet_loop import RayletLoop
from hpcray.runtime.router import Router
from hpcray.runtime.run_info import end_step, read_run, requeue_job
from hpcray.runtime.signals import USER_SIGNALS, outlive_user_signals, signals
from hpcray.runtime.spilling import Spilling
from hpcray.runtime.standby import follow
from hpcray.runtime.watchdog import Watchdog
from hpcray.transport.base import ControlTransport, DataPlane, StartError, TransportError
from hpcray.transport.start_checks import few_cores, several_tasks, threads_of_a_core
from hpcray.transport.startup import Launch, OnlyHere, SaidByRank0, read_launch
from hpcray.wire.messages import NodeInfo, RunInfo

_FINALIZE_TIME = 3.0
_SLOTS = 4
_REMOVAL_TIME = 120.0
_ID_BYTES = 28


class SaidElsewhere(StartupError):
    """This node did not come up for a reason that all have, and rank 0 tells it."""


class AlreadyTold(StartupError):
    """This node did not come up; why has been written to standard error."""


@dataclass
class _Node:
    """What was made before any library that starts threads was loaded."""

    options: NodeOptions
    config: Config
    launch: Launch
    session: Session
    arena: Arena
    template: TemplateLink
    listener: Listener
    gpus: tuple[str, ...]
    spill_dir: str
    run: RunInfo
    bound: RankPlan
    exit_file: str = ""
    moved: Relocation = field(default_factory=Relocation)
    journal: JournalFile | None = None

    @property
    def removal_time(self) -> float:
        """Seconds that removing the copies may take at the end. Nodes are not equally fast."""
        return _REMOVAL_TIME if self.moved.pairs else 0.0


@dataclass
class _Outcome:
    """How the loop ended. `failure`: why the cluster never came up. `broken`: MPI cannot be left in good order.
    `again`: the batch system is to run the job again. `decides`: the code is the job's."""

    code: int
    broken: bool
    failure: str
    again: bool = False
    decides: bool = False


def run_node(options: NodeOptions, ready: Callable[[str], None], life: int = -1) -> int:
    """Be the raylet of one node until the job is over. The caller then ends this process with `os._exit`: where other
    nodes died, exit handlers of MPI would wait for them.

    Args:
        options: of this node. With a `driver` in it, one rank runs that program as a child (`Config.driver_rank`).
        ready: called with the session directory when a driver may connect.
        life: a descriptor that is closed at its other end when whoever started this process is gone; -1 for none.

    Returns:
        The exit code of this process: the job's where the program ran, 0 elsewhere; 1 when this node had to give up.

    Raises:
        SaidElsewhere: likewise, and rank 0 tells why.
        AlreadyTold: likewise, and the user has been told.
        StartupError: this node did not come up; nothing of it is left.
        ValueError: an option is not valid.
    """
    outlive_user_signals()
    launch = read_launch(os.environ) if options.distributed else Launch()
    if options.distributed:
        _check_driver_rank(options.settings(), launch)
    try:
        node = _prepare(options, launch)
    except StartupError as error:
        if end_step(launch, error):
            raise AlreadyTold(str(error)) from error
        raise
    options = node.options
    try:
        with ended_by_sigterm(node.session.remove):
            control, data = _open_wires(node)
            _prepare_workers(options, node, control)
        need_open_files()
    except BaseException:
        _abandon(node)
        raise
    with signals() as wakeup:
        outcome = _serve(options, node, control, data, ready, life, wakeup)
    if outcome.again and (trouble := requeue_job(node.config)):
        print(f"hpcray: the job was not put back into the queue: {trouble}", file=sys.stderr, flush=True)
    if outcome.decides and outcome.broken and node.exit_file:
        tell(node.exit_file, outcome.code)
    if control is not None and data is not None:
        # Peers leave at the same time, and UCX calls that an error, on standard output.
        watchdog = Watchdog(_FINALIZE_TIME + node.removal_time, outcome.failure, outcome.code)
        with watchdog, silenced(not outcome.failure):
            data.close()
            control.close(abort=outcome.broken)
    if outcome.failure:
        raise StartupError(outcome.failure)
    return outcome.code


def load_worker() -> Callable[[str, int, int], NoReturn]:
    """Import what every worker needs; runs in the template process."""
    import numpy  # noqa: F401

    import hpcray

    if not hasattr(hpcray, "__version__"):  # our raylet does without it, see `bootstrap`
        hpcray.__spec__.loader.exec_module(hpcray)  # type: ignore[union-attr]
    from hpcray.runtime.worker_main import worker_main

    one_each()

    return worker_main


def _prepare(options: NodeOptions, launch: Launch) -> _Node:
    config, told = options.settings(), exit_file(os.environ)
    gpus = node_gpus(options.num_gpus, max(1, launch.here))
    spill_dir = spill_directory(config.spill_dir)
    run = read_run(config, launch)
    check_journal(config, os.environ, launch.rank)
    if launch.rank == 0:
        for text in Config.unknown_variables(os.environ):
            print(f"hpcray: {text}", file=sys.stderr, flush=True)
    options, bound = bind_node(options, config, max(1, launch.here), gpus)
    session = Session.create()
    try:
        size, slots = default_arena_size(config, max(1, launch.here)), _SLOTS * config.chunk
        arena = Arena.create(size, slots, config.huge_pages)
        if config.huge_pages == "reserved" and not arena.reserved:
            print(f"hpcray: node {launch.rank}: {NO_HUGE_PAGES}", file=sys.stderr, flush=True)
        template = start_template(load_worker, session.path, arena.fd, session.lock_fd)
    except BaseException:
        session.remove()
        raise
    adopt_orphans()
    listener = Listener(session.socket_path(0))
    return _Node(options, config, launch, session, arena, template, listener, gpus, spill_dir, run, bound, told)


def _check_driver_rank(config: Config, launch: Launch) -> None:
    """All ranks find the same, and rank 0 tells it."""
    if config.driver_rank >= launch.size:
        if launch.rank:
            raise SaidElsewhere("rank 0 tells why")
        raise StartupError(
            f"the program is to run on rank {config.driver_rank} (--driver-rank, HPCRAY_DRIVER_RANK), and there are "
            f"{launch.size} rank{'s' * (launch.size > 1)}; hint: ranks are counted from 0"
        )


def _tell_odd_starts(launch: Launch) -> None:
    """Rank 0 tells what works, but hardly as it was meant."""
    if launch.rank != 0 or launch.kind != "srun":
        return
    cores = few_cores(launch, read_allocation().cpus_meant, os.sched_getaffinity(0), threads_of_a_core())
    for text in filter(None, (several_tasks(launch), cores)):
        print(f"hpcray: {text}", file=sys.stderr, flush=True)


def _open_wires(node: _Node) -> tuple[ControlTransport | None, DataPlane | None]:
    _tell_odd_starts(node.launch)
    if node.launch.size == 1:
        return None, None
    prepare_mpi(os.environ, node.launch.kind == "srun")
    # Not imported before: an embedded node needs neither MPI nor UCX.
    from hpcray.transport.select import offers, open_transports

    if node.bound.adapters and offers(node.bound.adapters):
        prefer_adapters(os.environ, node.bound.adapters)
    try:
        control, data = open_transports(node.config)
        data.register(node.arena.view(0, node.arena.whole))
    except SaidByRank0:
        raise SaidElsewhere("rank 0 tells why") from None
    except StartError as error:
        if (node.launch.rank or isinstance(error, OnlyHere)) and end_step(node.launch, error):
            raise AlreadyTold(str(error)) from error
        raise StartupError(str(error)) from error
    except TransportError as error:
        raise StartupError(str(error)) from error
    return control, data


def _prepare_workers(options: NodeOptions, node: _Node, control: ControlTransport | None) -> None:
    """Before the first worker is forked: copies of directories, modules that all of them need."""
    if options.broadcast_env:
        from hpcray.runtime.broadcast import ToldToOthers, share

        try:
            timeout = node.config.start_timeout
            node.moved = share(options.broadcast_env, options.driver, control, node.session.path, timeout)
        except ToldToOthers:
            raise SaidElsewhere("rank 0 tells why") from None
    node.template.prepare(node.moved.pairs, [name for name in node.config.preload.split(",") if name])


def _serve(
    options: NodeOptions,
    node: _Node,
    control: ControlTransport | None,
    data: DataPlane | None,
    ready: Callable[[str], None],
    life: int,
    wakeup: int,
) -> _Outcome:
    """Compose the raylet and run its loop."""
    rank, size = (control.rank, control.size) if control is not None else (0, 1)
    address, config = node_ip_address(), node.config
    info = NodeInfo(
        index=rank,
        node_id=os.urandom(_ID_BYTES).hex(),
        host=socket.gethostname(),
        address=address,
        pid=os.getpid(),
        total=total_resources(
            options,
            address,
            rank,
            max(1, node.launch.here),
            node.arena.size,
            len(node.gpus),
            gpu_type() if node.gpus else "",
        ),
        data_address=data.address() if data is not None else b"",
        data_plane=data.name if data is not None else "",
        arena_size=node.arena.size,
        labels=parse_labels(config.labels),
        session_dir=node.session.path if config.same_host else "",
    )
    driver_rank = config.driver_rank if size > 1 else 0
    seat = Seat(info, size, node.session.path, config, driver_rank)
    router = Router(rank, size, control)
    loop = RayletLoop(router, node.listener, control, data)
    core = RayletCore(rank, info.total, size, config, node.gpus)
    prefault = Prefaulter(node.arena)
    head = HeadCore(config) if rank == 0 else None
    spill, chunk = config.spill_threshold, config.chunk
    store = NodeStore(rank, node.arena.size, spill_threshold=spill, chunk=chunk, slots=_SLOTS)
    raylet = Raylet(seat, loop, router, core, store, head, prefault, data)
    spilling = Spilling(raylet, SpillFiles(node.spill_dir, node.arena, raylet.say))
    processes = LocalProcesses(rank, node.template, loop, router, node.arena.fd, raylet)
    raylet.processes = processes
    raylet.guests = Guests(raylet, node.arena.fd)
    attend(raylet, node.listener, node.template.pid, chunk, _SLOTS)
    leaving = Leaving(
        loop,
        processes,
        node.template,
        node.session,
        config.stop_timeout,
        lambda: cluster.node_gone(),
        node.removal_time,
    )

    def up() -> None:
        if options.driver and rank == driver_rank:
            with as_started(node.bound.mask):
                driver = DriverChild(options.driver, node.session.path, node.moved)
            node.template.watch_driver(driver.pid)
            processes.expect_driver(driver.pid)
            cluster.own_driver(driver)
        ready(node.session.path)

    elders = [os.getpid()]
    if options.distributed and life >= 0:
        # This process is a rank's child. Where the launcher is killed, nobody else ends the rank, which may be asleep.
        elders.append(os.getppid())
        node.template.watch_driver(os.getppid())
    family = [found for pid in elders if (found := Family.of(pid)) is not None]
    membership = Membership(size, os.urandom(8).hex(), config, loop.now) if rank == 0 else None
    watch = HeadWatch(rank, config) if rank else None
    far = bool(options.driver) and rank != driver_rank
    cluster = Cluster(
        raylet, leaving, node.session, node.template.pid, family, membership, watch, control, data, up, far
    )
    loop.watch(wakeup, lambda event: _read_signals(wakeup, cluster))
    if life >= 0:
        loop.watch(life, lambda event: _end_of_life(loop, life, cluster.parent_gone))
    if membership is not None and head is not None:
        membership.run = node.run
        membership.allow(node.removal_time)
        cluster.drain.lead(node.run, head)

    def journal() -> JournalFile | None:
        node.journal = open_journal(config, os.environ, raylet.say)
        return node.journal

    try:
        follow(raylet, cluster, membership, journal)
        cluster.join()
        loop.run(raylet)
    finally:
        prefault.stop()
        loop.close()
        spilling.close()
        node.template.close()
        node.session.remove()
        if node.journal is not None:
            over = cluster.came_up and leaving.begun and not cluster.fenced
            node.journal.close(remove=over and not (leaving.code or cluster.drain.again))
    failure = cluster.failure
    if not cluster.came_up:
        failure = failure or "the job was stopped before it was up; hint: see what rank 0 printed"
        return _Outcome(1, cluster.broken, failure)
    decides = rank == driver_rank or cluster.program_lost
    code = leaving.code if decides else 0
    return _Outcome(code or int(bool(failure)), cluster.broken, "", cluster.drain.again, decides)


def _abandon(node: _Node) -> None:
    """Undo `_prepare`."""
    node.listener.close()
    node.template.close()
    node.template.reap()
    node.session.remove()
    node.arena.close()


def _read_signals(fd: int, cluster: Cluster) -> None:
    for number in set(os.read(fd, 4096)):
        if number == signal.SIGCHLD:
            cluster.child_ended()
        elif number in USER_SIGNALS:
            cluster.user_signalled(number)
        elif number == signal.SIGHUP:
            cluster.signalled(signal.SIGTERM)
        else:
            cluster.signalled(number)


def _end_of_life(loop: RayletLoop, fd: int, tell: Callable[[], None]) -> None:
    loop.unwatch(fd)
    tell()
