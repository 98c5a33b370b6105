"""`ray start`: one node of a cluster, from the command line to its end."""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from hpcray.common.exceptions import StartupError
from hpcray.platform.config_files import configured_environment, launch_config
from hpcray.platform.launcher_environment import strip_launcher_variables
from hpcray.platform.process_control import set_process_name
from hpcray.platform.process_tree import ProcessIdentity
from hpcray.platform.session_directory import ADDRESS, OWN_SESSION, read_session, remove_dead_sessions
from hpcray.platform.sockets import node_ip_address
from hpcray.processes.bootstrap import NodeChild
from hpcray.ray_start.allocation_watch import AllocationWatch, Guard
from hpcray.ray_start.clusters import (
    CLIENT_PORT,
    DASHBOARD_PORT,
    DEFAULT_PORT,
    StartedCluster,
    StartedNode,
    parse_cluster_name,
)
from hpcray.ray_start.flags import parse_resources, parse_start_labels, without_meaning
from hpcray.ray_start.head_search import Bell, HeadSearch
from hpcray.ray_start.keeper import Door, KeeperSignals, Sweeper, default_signals, keep_node
from hpcray.ray_start.order import END_NOTE
from hpcray.ray_start.registry import (
    FAILED,
    STARTING,
    UP,
    Registry,
    StartCall,
    machine_id,
    open_start_directory,
    publish_node,
)
from hpcray.ray_start.session_files import SessionFiles, temporary_directory
from hpcray.ray_start.surroundings import (
    absent_devices,
    dies_with_step,
    is_in_step,
    is_loopback,
    offered_cpus,
    own_allocation,
    own_cgroups,
    own_names,
    resolve,
)
from hpcray.runtime.node.join_token import request_join_token
from hpcray.runtime.node.options import NodeOptions

_OF_LAUNCHER = ("SLURM_STEP_NUM_TASKS", ADDRESS, OWN_SESSION, "HPCRAY_CONSOLE", "HPCRAY_EXIT_FILE")
"""Variables by which a process of this node would take itself for a rank of the step, or for a part of another job."""
_RAYS_OWN_END = {"drain_signals": "none", "drain_margin": 0.0}
"""Defaults of a started cluster: it lives until it is stopped, as on Ray; a drain needs the variables."""
_FIRST_FREE, _LAST_FREE = 20000, 32767


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The report of `ray start` on a node that is up.

    Attributes:
        address: H:P of the cluster.
        ip: of the node.
        log: path of its log.
        session_dir: its session directory.
        dashboard_port: the number in `http://H:P`.
        notes: lines about what is odd.
    """

    address: str
    ip: str
    log: str
    session_dir: str
    dashboard_port: int
    notes: tuple[str, ...] = ()


class StartRequest:
    """The options of one `ray start`, checked.

    Args:
        given: by the keys of `START_FLAGS`; None: not given.
        environ: of this process.

    Raises:
        ValueError: an option is not valid, or goes with no head or no address. OSError: a file cannot be read.
    """

    def __init__(self, given: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        self.given, self.environ = given, environ
        self.head = bool(given.get("head"))
        self.address: str = given.get("address") or ""
        if not self.head and not self.address:
            raise ValueError("`--address` is a required flag unless starting a head node with `--head`.")
        if not self.head:
            for flag in ("port", "include_dashboard"):
                if given.get(flag) is not None:
                    name = f"--{flag.replace('_', '-')}"
                    raise ValueError(f"`{name}` should only be specified when starting head node with `--head`.")
            if self.address != "auto" and parse_cluster_name(self.address) is None:
                raise ValueError(f"--address={self.address} is not valid; hint: H:P, as `ray start --head` prints it")
        for flag in ("port", "dashboard_port", "ray_client_server_port"):
            if (port := given.get(flag)) is not None and not 0 <= port <= 65535:
                raise ValueError(f"--{flag.replace('_', '-')}={port} is no port")
        self.allocation = own_allocation(environ)
        self.notes: list[str] = []
        self.node = self._node_options()

    def _node_options(self) -> NodeOptions:
        given, environ = self.given, self.environ
        cpus, note = (given["num_cpus"], "") if given.get("num_cpus") is not None else offered_cpus(environ)
        if note:
            self.notes.append(note)
        config: dict[str, Any] = {}
        if given.get("object_store_memory"):
            config["object_store_memory"] = given["object_store_memory"]
        if labels := parse_start_labels(given.get("labels"), given.get("labels_file")):
            config["labels"] = labels
        if given.get("object_spilling_directory"):
            config["spill_dir"] = os.path.abspath(given["object_spilling_directory"])
        if self.head:
            known = configured_environment(environ)
            config |= {name: value for name, value in _RAYS_OWN_END.items() if f"HPCRAY_{name.upper()}" not in known}
            config["elastic"] = True
        options = NodeOptions(
            config=config,
            num_cpus=cpus,
            num_gpus=given.get("num_gpus"),
            memory=given.get("memory"),
            resources=parse_resources(given.get("resources")),
            node_name=given.get("node_name") or "",
            address=_ip_of(given.get("node_ip_address") or ""),
        )
        options.settings()
        return options


def _ip_of(given: str) -> str:
    """The address that --node-ip-address means: a name stands for its address, the loopback, and 0.0.0.0, for this
    host's."""
    if not given:
        return ""
    if is_loopback(given):
        return node_ip_address()
    if given.replace(".", "").isdigit() or ":" in given:
        return given
    found = resolve(given)
    return next((address for address in found if ":" not in address), found[0] if found else node_ip_address())


class NodeStart:
    """One node of a started cluster, in the process that holds it.

    Args:
        request: what was asked for.
        files: where its logs are.
        log: called with lines about what happens.
        given_up: asked while it waits: whether the command that waits for this process has ended.
        block: whether the command itself stays.
    """

    def __init__(
        self,
        request: StartRequest,
        files: SessionFiles,
        log: Callable[[str], None],
        given_up: Callable[[], bool],
        block: bool,
    ) -> None:
        self._block = block
        self._request, self._files, self._log, self._given_up = request, files, log, given_up
        self._registry = Registry(request.environ)
        self._call = _new_call(request.allocation)
        self._in_step = self._call.in_step or is_in_step()
        self._cluster: StartedCluster | None = None
        self._bell: Bell | None = None

    def run(self, ready: Callable[[Started], bool]) -> int:
        """Start the node, and stay until it has ended. Returns the exit code.

        Args:
            ready: called when the node is up; False: the command that waited for it has ended.

        Raises:
            StartupError, OSError, ConnectionError: it did not start; the reason is where the program's error finds it.
        """
        request, registry = self._request, self._registry
        registry.sweep(request.allocation)
        registry.write_call(self._call)
        strip_launcher_variables(os.environ)
        if absent := absent_devices(os.environ):
            self._log(f"UCX_NET_DEVICES={absent} names no device of {socket.gethostname()}: this node goes without it")
            del os.environ["UCX_NET_DEVICES"]
        for name in _OF_LAUNCHER:
            os.environ.pop(name, None)
        try:
            with default_signals():
                node = self._start_head() if request.head else self._join()
        except BaseException as error:
            self._close()
            if isinstance(error, (SystemExit, KeyboardInterrupt)) or not request.allocation:
                registry.remove_call(self._call.ident)  # outside of an allocation no program would look for the reason
            else:
                registry.write_call(msgspec.structs.replace(self._call, state=FAILED, reason=str(error)))
            raise
        cluster = self._cluster
        assert cluster is not None
        with KeeperSignals() as received:
            self._call = msgspec.structs.replace(
                self._call, state=UP, cluster=cluster.ident, session_dir=node.session_dir
            )
            registry.write_call(self._call)
            self._files.point_here(cluster.name)
            sweeper = Sweeper(partial(self._sweep, node.session_dir)) if self._block else None
            guard = self._guard(node.session_dir)
            watch = AllocationWatch(request.allocation) if request.allocation else None
            door = Door(self._call.ident, node.session_dir)
            try:
                if guard is not None and self._in_step:
                    guard.await_begun()
                if ready(self._report(cluster, node.session_dir)):
                    return keep_node(node, received, self._bell, watch, self._log)
                return node.leave()
            finally:
                door.close()
                node.leave()
                if watch is not None:
                    watch.close()
                self._close()
                registry.remove_call(self._call.ident)
                self._files.close()
                if sweeper is not None:
                    sweeper.dismiss()
                if guard is not None:
                    guard.close()

    def _guard(self, session_dir: str) -> Guard | None:
        """The guard that removes this node's files where the site kills all that a step leaves. A step that stays is
        killed so by cgroups only."""
        kind, _, job = self._request.allocation.partition("-")
        wanted = launch_config(self._request.environ).start_guard and (not self._block or self._call.in_step)
        if kind != "slurm" or not wanted or shutil.which("srun") is None:
            return None
        cluster = self._registry.path_of(self._call.ident) if self._request.head else ""
        return Guard(job, session_dir, cluster, self._request.environ)

    def _sweep(self, session_dir: str) -> bool:
        """Remove what the node has left. Returns whether all of it is gone. The file of the command says that it was
        killed, and stays."""
        remove_dead_sessions(os.environ)
        if self._request.head:
            self._registry.remove_cluster(self._call.ident)
        self._files.close()
        return not os.path.exists(session_dir)

    def _report(self, cluster: StartedCluster, session_dir: str) -> Started:
        notes = list(self._request.notes)
        if self._files.note:
            notes.append(self._files.note)
        if self._in_step and not self._block:
            notes.append(
                "This node runs in a step of Slurm's. Where the site kills what a step leaves at its end, as with "
                "cgroups, the node ends with its step; hint: ray start --block"
            )
        if ignored := without_meaning(self._request.given):
            self._log(f"without effect here, as nothing listens and nothing is collected: {', '.join(ignored)}")
        for note in notes:
            self._log(note)
        ip = self._request.node.address or node_ip_address()
        return Started(
            address=cluster.name,
            ip=ip,
            log=self._files.log,
            session_dir=session_dir,
            dashboard_port=cluster.dashboard_port,
            notes=tuple(notes),
        )

    def _options(self, **more: Any) -> NodeOptions:
        kept = configured_environment(self._request.environ).get("HPCRAY_LOG_DIR")
        node = self._request.node
        config = {**node.config, "end_note": END_NOTE} if self._in_step and not self._block else node.config
        return msgspec.structs.replace(node, logs="" if kept else self._files.logs, config=config, **more)

    # ------------------------------------------------------------ the head

    def _start_head(self) -> NodeChild:
        request, given, registry = self._request, self._request.given, self._registry
        open_start_directory(registry.path, make=True).close()  # no program joins a head that cannot keep its secret
        ip = request.node.address or node_ip_address()
        names = tuple(dict.fromkeys([*own_names(), ip, *filter(None, [given.get("node_ip_address")])]))
        port = given.get("port")
        if port != 0:
            self._refuse_second(ip, DEFAULT_PORT if port is None else port)
        bell = launch_config(request.environ).start_bell
        if port is not None and bell:
            self._open_bell(port)
        if self._bell is not None:
            port = self._bell.port
        elif port == 0:
            taken = {known.cluster.port for known in registry.clusters()}
            port = random.choice([free for free in range(_FIRST_FREE, _LAST_FREE) if free not in taken])
        node = NodeChild(self._options())
        try:
            info = read_session(node.session_dir)
            self._cluster = StartedCluster(
                ident=self._call.ident,
                session=info.session,
                allocation=request.allocation,
                host=socket.gethostname(),
                names=names,
                address=ip,
                port=DEFAULT_PORT if port is None else port,
                client_port=given.get("ray_client_server_port") or CLIENT_PORT,
                dashboard_port=given.get("dashboard_port") or DASHBOARD_PORT,
                started=time.time(),
                bell=self._bell is not None,
            )
            path = registry.path_of(self._cluster.ident)
            token = request_join_token(node.session_dir, True, path)
            registry.write_cluster(self._cluster, token)
            self._publish(node, self._cluster, request.allocation, head=True)
        except BaseException:
            node.leave(1.0)
            raise
        return node

    def _refuse_second(self, ip: str, port: int) -> None:
        for known in self._registry.clusters():
            same = known.cluster.host == socket.gethostname() and known.cluster.port == port
            if same and known.cluster.allocation == self._request.allocation:
                raise StartupError(
                    f"Ray is trying to start at {ip}:{port}, but is already running at {known.cluster.name}. Please "
                    "specify a different port using the `--port` flag of `ray start` command; hint: ray stop"
                )

    def _open_bell(self, port: int) -> None:
        try:
            self._bell = Bell(port)
        except OSError as error:
            self._log(
                f"no bell at port {port}: {error.strerror}; the cluster does without, scripts that test it do not"
            )

    # ------------------------------------------------------------ further nodes

    def _join(self) -> NodeChild:
        request = self._request
        search = HeadSearch(self._registry, request.address, request.allocation, request.environ, self._log)
        try:
            return self._join_found(search)
        finally:
            search.close()

    def _join_found(self, search: HeadSearch) -> NodeChild:
        request = self._request
        while True:
            known = search.next()
            if known is None:
                if self._given_up():
                    raise SystemExit(1)
                search.pause()
                continue
            try:
                node = NodeChild(self._options(join=known.path))
            except StartupError as error:
                search.failed(known, error)
                continue
            try:
                self._cluster = known.cluster
                self._publish(node, known.cluster, request.allocation or known.cluster.allocation, head=False)
            except BaseException:
                node.leave(1.0)
                raise
            return node

    # ------------------------------------------------------------ both

    def _publish(self, node: NodeChild, cluster: StartedCluster, allocation: str, head: bool) -> None:
        publish_node(
            StartedNode(
                cluster=cluster,
                session_dir=node.session_dir,
                allocation=allocation,
                keeper=self._call.pid,
                started=self._call.started,
                head=head,
            )
        )

    def _close(self) -> None:
        if self._bell is not None:
            self._bell.close()
            self._bell = None
        if self._cluster is not None and self._cluster.ident == self._call.ident:
            self._registry.remove_cluster(self._call.ident)


def start_and_stay(request: StartRequest, ready: Callable[[Started], None]) -> int:
    """Start a node, and hold it in this process until it has ended (`--block`). Returns the exit code.

    Raises:
        StartupError, OSError, ConnectionError: it did not start.
    """
    files = _session_files(request)
    set_process_name("hpcray-keeper")

    def up(started: Started) -> bool:
        ready(started)
        return True

    with files.open_log() as log:
        try:
            return NodeStart(request, files, _logger(log, sys.stderr), lambda: False, True).run(up)
        except BaseException:
            files.close()
            raise


def start_and_return(request: StartRequest) -> Started:
    """Start a node that a keeper holds, and return when it is up.

    Raises:
        StartupError: it did not start.
    """
    files = _session_files(request)
    read, write = os.pipe2(os.O_CLOEXEC)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(read)
        _be_keeper(request, files, write)
    os.close(write)
    with open(read, "rb") as pipe:
        answer = pipe.read()
    if not answer:
        _, status = os.waitpid(child, 0)
        raise StartupError(f"the node has ended before it was up ({status}); its log: {files.log}")
    started: Started | str = msgspec.json.decode(answer, type=Started | str)
    if isinstance(started, str):
        os.waitpid(child, 0)
        raise StartupError(started)
    return started


def _be_keeper(request: StartRequest, files: SessionFiles, write: int) -> None:
    """Be the process that stays; never returns."""
    code = 1
    try:
        os.setsid()
        set_process_name("hpcray-keeper")
        poll = select.poll()
        poll.register(write, 0)

        def tell(what: Started | str) -> bool:
            try:
                os.write(write, msgspec.json.encode(what))
                os.close(write)
            except OSError:
                return False  # the command was killed meanwhile
            return True

        try:
            log = files.open_log()
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            # Whoever reads the output of the command waits until nobody has it open.
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            code = NodeStart(request, files, _logger(log), lambda: bool(poll.poll(0)), False).run(tell)
        except (StartupError, OSError, ValueError) as error:
            files.close()
            tell(str(error))
        except SystemExit:
            files.close()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _session_files(request: StartRequest) -> SessionFiles:
    return SessionFiles(*temporary_directory(request.given.get("temp_dir"), request.environ))


def _logger(*files: Any) -> Callable[[str], None]:
    def log(text: str) -> None:
        for file in files:
            with contextlib.suppress(OSError, ValueError):
                print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} hpcray: {text}", file=file, flush=True)

    return log


def write_failure(reason: str, environ: Mapping[str, str]) -> None:
    """Note that this `ray start` has failed before it had a node. Outside of an allocation no program would look."""
    if allocation := own_allocation(environ):
        Registry(environ).write_call(_new_call(allocation, state=FAILED, reason=reason))


def _new_call(allocation: str, state: str = STARTING, reason: str = "") -> StartCall:
    me = ProcessIdentity.of(os.getpid())
    return StartCall(
        ident=os.urandom(8).hex(),
        command=" ".join(["ray", *sys.argv[1:]]),
        allocation=allocation,
        host=socket.gethostname(),
        pid=os.getpid(),
        started=me.started if me is not None else 0,
        machine=machine_id(),
        begun=time.time(),
        state=state,
        reason=reason,
        in_step=dies_with_step(own_cgroups()),
    )
