"""`ray.cluster_utils.Cluster`: several nodes on this host, for tests of programs that want more than one.

`add_node` at first only collects nodes, and mpirun starts all of them when they are needed: at the first use of a
session that `init(address=cluster.address)` has announced, or when another process is given the address. A node that is
added later joins the running job. The driver of rank 0, this module as a program, publishes the address and waits until
this process closes a pipe or dies; this process joins as a second driver.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from hpcray.api.runtime_context import nodes
from hpcray.api.session import LateAddress, init, is_initialized, shutdown
from hpcray.common.config import Config
from hpcray.common.exceptions import StartupError
from hpcray.common.labels import labels_problem, labels_text
from hpcray.launch.launch_line import find_mpirun
from hpcray.platform.config_files import node_config
from hpcray.platform.process_control import module_line
from hpcray.platform.process_tree import ProcessIdentity
from hpcray.platform.session_directory import SessionInfo, live_sessions, read_session
from hpcray.runtime.core_worker.core_worker import current
from hpcray.runtime.node.join_token import request_join_token, write_join_token
from hpcray.runtime.node.options import NODE_ID, NODE_ID_BYTES, NODE_NAME

cluster_not_supported = False
"""False, as in Ray on Linux: tests of programs look here whether there is a `Cluster`."""
_SHUTDOWN_TIMEOUT = 15.0  # seconds until the launcher is killed
_START_MARGIN = 10.0  # seconds beyond the setting `start_timeout`
_KILL_TIMEOUT = 10.0  # seconds in which a killed raylet is gone
_DEATH_MARGIN = 5.0  # seconds beyond the setting `node_timeout`
_POLL_INTERVAL = 0.02  # seconds
_OBJECT_STORE_BYTES = 150 << 20  # of a node
_ADDRESS_FILE = "address"
_TOKEN = "join-token"
_LIFE_FIFO = "life"
_FLAGS = {"num_cpus": "--num-cpus", "num_gpus": "--num-gpus", "memory": "--memory"}
_KNOWN = (*_FLAGS, "object_store_memory", "resources", "labels", "env_vars", "node_name", "node_id", "_system_config")
_WITHOUT_EFFECT = (
    "autoscaling_config", "cluster_id", "dashboard_agent_listen_port", "dashboard_host", "dashboard_port",
    "enable_object_reconstruction", "external_addresses", "gcs_address", "gcs_server_port", "huge_pages",
    "include_dashboard", "include_log_monitor", "log_to_stderr", "max_worker_port", "metrics_agent_port",
    "metrics_export_port", "min_worker_port", "no_monitor", "node_ip_address", "node_manager_port",
    "num_redis_shards", "object_manager_port", "object_spilling_directory", "plasma_directory",
    "plasma_store_socket_name", "ray_client_server_port", "ray_debugger_external", "raylet_socket_name",
    "redirect_output", "redis_address", "redis_max_clients", "redis_password", "redis_port", "redis_shard_ports",
    "redis_username", "resource_isolation_config", "runtime_env_agent_port", "runtime_env_dir_name", "session_name",
    "setup_worker_path", "temp_dir", "webui", "worker_path", "worker_port_list",
)  # fmt: skip
"""Arguments of Ray's `add_node` that nothing here depends on: ports, sockets and services that hpcray does not have."""


class ClusterNode:
    """A node of a `Cluster`.

    Args:
        cluster: the cluster that the node belongs to.
        index: position in the order of `add_node`.
        options: the arguments of `add_node`.
    """

    def __init__(self, cluster: Cluster, index: int, options: dict[str, Any]) -> None:
        self._cluster = cluster
        self._index = index
        self._options = options
        self.node_id: str = options.get("node_id") or os.urandom(NODE_ID_BYTES).hex()
        self.unique_id = self.node_id
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Address of the job, for `init(address=...)`. Starts the cluster."""
        return self._cluster._started_address()

    def get_session_dir_path(self) -> str:
        """Session directory of the node. Starts the cluster."""
        return self._cluster._info(self).path

    def kill_raylet(self) -> None:
        """Kill the raylet of the node with SIGKILL, which looks like the loss of a machine; returns when it is gone."""
        raylet = ProcessIdentity.of(self._cluster._info(self).pid)
        if raylet is None:
            return
        os.kill(raylet.pid, signal.SIGKILL)
        deadline = time.monotonic() + _KILL_TIMEOUT
        while ProcessIdentity.of(raylet.pid) == raylet and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL)

    def __repr__(self) -> str:
        return f"ClusterNode({self._index}, {self._options})"


class Cluster:
    """Several raylets on this host.

    Args:
        initialize_head: add the head node.
        connect: join the cluster. Nodes start when the session is used.
        head_node_args: options of the head node, as for `add_node`.
        shutdown_at_exit: call `shutdown` when this interpreter exits. The nodes end with this process in any case.
    """

    def __init__(
        self,
        initialize_head: bool = False,
        connect: bool = False,
        head_node_args: dict[str, Any] | None = None,
        shutdown_at_exit: bool = True,
        cluster_id: str | None = None,
    ) -> None:
        self._nodes: list[ClusterNode] = []
        self._removed: set[int] = set()
        self._launcher: subprocess.Popen[bytes] | None = None
        self._directory = ""
        self._life = -1
        self._address = ""
        self._late = LateAddress(self._started_address, lambda: self._launcher is not None)
        self._session = ""
        self._infos: dict[str, SessionInfo] = {}
        self.connected = False
        if connect and not initialize_head:
            raise RuntimeError("Cannot connect to uninitialized cluster.")
        if initialize_head:
            self.add_node(**(head_node_args or {}))
            if connect:
                self.connect()
        if shutdown_at_exit:
            atexit.register(self.shutdown)

    def add_node(self, wait: bool = True, **node_args: Any) -> ClusterNode:
        """Add a node. The first one is the head.

        Args:
            wait: where the cluster runs, return when the node is in it. Else all nodes start together later.
            node_args: num_cpus (1), num_gpus (0), memory, object_store_memory (150 MiB), resources, labels, env_vars,
                node_name. `_system_config` of the head is that of all nodes.

        Raises:
            StartupError: the node cannot join the running job.
            TypeError: an option is unknown. ValueError: one is not valid.
        """
        unknown = [name for name in node_args if name not in _KNOWN and name not in _WITHOUT_EFFECT]
        if unknown:
            raise TypeError(f"Cluster.add_node() does not know {unknown}; hint: it takes {sorted(_KNOWN)}")
        problem = labels_problem(node_args.get("labels") or {})
        if problem:
            raise ValueError(problem)
        given = {name: value for name, value in node_args.items() if value is not None}
        options = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": _OBJECT_STORE_BYTES, **given}
        node = ClusterNode(self, len(self._nodes), options)
        if self._launcher is not None:
            self._join(node, wait)
        self._nodes.append(node)
        LateAddress.newest = self._late
        return node

    def _join(self, node: ClusterNode, wait: bool) -> None:
        """Start a node that joins the running job."""
        path = os.path.join(self._directory, _TOKEN)
        if not os.path.exists(path):
            write_join_token(path, request_join_token(self._address))
        environ = _environ([known._options for known in [*self._nodes, node]])
        line = module_line("hpcray", *_options(node._options), "--join", path)
        node._process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, env={**environ, **_identity(node)}, start_new_session=True
        )
        if wait:
            self._wait_until_in(node, node._process)

    def _wait_until_in(self, node: ClusterNode, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + node_config(os.environ).start_timeout + _START_MARGIN
        while self._find(node) is None:
            code = process.poll()
            if code is not None or time.monotonic() > deadline:
                process.kill()
                how = "is not in the cluster in time" if code is None else f"ended (exit code {code})"
                raise StartupError(f"the added node {how}; see what was printed above")
            time.sleep(_POLL_INTERVAL)

    def remove_node(self, node: ClusterNode, allow_graceful: bool = True) -> None:
        """Remove a node. Where the cluster is running, the raylet of the node is killed. A process that has joined the
        cluster returns when the head knows of the death.

        Args:
            allow_graceful: without effect.

        Raises:
            ValueError: this process is connected to the node, or the node belongs to another cluster. In the first case
                the process leaves the session, as in Ray.
        """
        if node not in self._nodes or node._index in self._removed:
            raise ValueError(f"{node} is no node of this cluster")
        if is_initialized() and node._index == 0:
            shutdown()
            raise ValueError(
                "Removing a node that is connected to this Ray client is not allowed because it will break the driver. "
                "hint: remove another node"
            )
        if self._launcher is None:
            self._nodes.remove(node)
            for index, left in enumerate(self._nodes):
                left._index = index
            return
        node.kill_raylet()
        self._removed.add(node._index)
        self._wait_for_death(node)

    def _wait_for_death(self, node: ClusterNode) -> None:
        """Wait until the head has declared a killed node dead: at once, or where its wire reports no error, when it has
        been silent for `node_timeout`."""
        deadline = time.monotonic() + node_config(os.environ).node_timeout + _DEATH_MARGIN
        while (process := current.process) is not None and time.monotonic() < deadline:
            if not any(row["NodeID"] == node.node_id and row["Alive"] for row in process.gcs.nodes()):
                return
            time.sleep(_POLL_INTERVAL)

    @property
    def head_node(self) -> ClusterNode | None:
        """The head node; None where there is none, or it was removed."""
        return self._nodes[0] if self._nodes and 0 not in self._removed else None

    @property
    def worker_nodes(self) -> set[ClusterNode]:
        """All nodes but the head, without those that were removed."""
        return {node for node in self._nodes[1:] if node._index not in self._removed}

    def list_all_nodes(self) -> list[ClusterNode]:
        """All nodes that were not removed."""
        return [node for node in self._nodes if node._index not in self._removed]

    @property
    def address(self) -> str | None:
        """Address for `init(address=...)`, which starts the nodes when the session is used; None without a head."""
        if self.head_node is None:
            return None
        return self._late if self._launcher is None else self._address

    gcs_address = address

    def connect(self, namespace: str | None = None) -> None:
        """Join the cluster as a driver."""
        assert self.address is not None, "the cluster has no head; hint: add_node()"
        assert not self.connected, "this process has joined the cluster"
        init(self.address, namespace=namespace, ignore_reinit_error=True)
        self.connected = True

    def wait_for_nodes(self, timeout: float = 30) -> None:
        """Wait until as many nodes are alive as were added and not removed. Nodes that have not started yet come up
        together: there is nothing to wait for.

        Args:
            timeout: in seconds.

        Raises:
            TimeoutError: the number of live nodes differs after `timeout`.
        """
        if self._launcher is None or not is_initialized():
            return  # where the head has started its driver, all nodes are up
        expected = len(self.list_all_nodes())
        deadline = time.monotonic() + timeout
        while (alive := sum(row["Alive"] for row in nodes())) != expected:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{alive} nodes are alive after {timeout:g} s, not {expected}")
            time.sleep(_POLL_INTERVAL)

    def shutdown(self) -> None:
        """Leave the job if this process has joined it, and stop all nodes."""
        atexit.unregister(self.shutdown)
        if LateAddress.newest is self._late:
            LateAddress.newest = None
            current.forget_postponed()
        if self.connected:
            self.connected = False
            shutdown()
        if self._launcher is not None:
            self._stop()
        self._nodes = []

    def _stop(self) -> None:
        assert self._launcher is not None
        os.close(self._life)
        self._life = -1
        try:
            self._launcher.wait(_SHUTDOWN_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._launcher.kill()  # every raylet sees that its parent is gone
            self._launcher.wait()
        for node in self._nodes:
            if node._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    node._process.wait(_SHUTDOWN_TIMEOUT)
                node._process.kill()
                node._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._launcher = None
        self._removed, self._address, self._infos = set(), "", {}

    def remaining_processes_alive(self) -> bool:
        """Return True if the raylets of all nodes are alive that were not removed."""
        infos = [self._info(node) for node in self.list_all_nodes()]
        return all(ProcessIdentity.of(info.pid) is not None for info in infos)

    def _started_address(self) -> str:
        self._start()
        return self._address

    def _start(self) -> None:
        if self._launcher is not None:
            return
        if not self._nodes:
            raise RuntimeError("the cluster has no nodes; hint: add_node()")
        mpirun = find_mpirun("", os.path.dirname(sys.executable))
        self._directory = tempfile.mkdtemp(prefix="hpcray-cluster-")
        life = os.path.join(self._directory, _LIFE_FIFO)
        os.mkfifo(life, 0o600)
        self._life = os.open(life, os.O_RDWR)
        self._launcher = subprocess.Popen(
            _line(mpirun, self._nodes, self._directory),
            stdin=subprocess.DEVNULL,
            env=_environ([node._options for node in self._nodes]),
            start_new_session=True,
        )
        try:
            self._address = self._wait_for_address()
            self._session = read_session(self._address).session
        except BaseException:
            self._launcher.kill()
            self.shutdown()
            raise

    def _wait_for_address(self) -> str:
        assert self._launcher is not None
        path = os.path.join(self._directory, _ADDRESS_FILE)
        deadline = time.monotonic() + node_config(os.environ).start_timeout + _START_MARGIN
        while not os.path.exists(path):
            code = self._launcher.poll()
            if code is not None or time.monotonic() > deadline:
                how = "are not up in time" if code is None else f"ended (exit code {code})"
                raise StartupError(f"the {len(self._nodes)} nodes of the cluster {how}; see what was printed above")
            time.sleep(_POLL_INTERVAL)
        with open(path, encoding="utf-8") as file:
            return file.read()

    def _info(self, node: ClusterNode) -> SessionInfo:
        self._start()
        if node._process is not None and self._find(node) is None:
            self._wait_until_in(node, node._process)
        found = self._find(node)
        assert found is not None, f"{node} is not up"
        return found

    def _find(self, node: ClusterNode) -> SessionInfo | None:
        """The session directory of a node that is up, or was until it died."""
        if node.node_id not in self._infos:
            self._infos.update({info.node_id: info for info in live_sessions() if info.session == self._session})
        return self._infos.get(node.node_id)


def _line(mpirun: str, nodes: list[ClusterNode], directory: str) -> list[str]:
    """Build the mpirun command: one rank for each node, each with its own options."""
    line = [mpirun, *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    # Without recovery the loss of one rank would end all of them.
    line += ["--enable-recovery", "--bind-to", "none", "--map-by", "node:OVERSUBSCRIBE"]
    for index, node in enumerate(nodes):
        row = node._options
        line += [":"] if index else []
        line += ["-n", "1", "env", *(f"{name}={value}" for name, value in _identity(node).items())]
        line += module_line("hpcray", *_options(row))
        line += ["-m", "hpcray.compat.cluster_utils", directory]
    return line


def _identity(node: ClusterNode) -> dict[str, str]:
    """Variables of one node alone."""
    row = node._options
    own = {NODE_ID: node.node_id, NODE_NAME: row.get("node_name") or "", **(row.get("env_vars") or {})}
    return {name: str(value) for name, value in own.items()}


def _options(row: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for name, flag in _FLAGS.items():
        if row.get(name) is not None:
            found += [flag, f"{row[name]:.15g}"]
    if row.get("object_store_memory") is not None:
        found += ["--object-store-memory", str(int(row["object_store_memory"]))]
    resources = row.get("resources")
    if resources:
        found += ["--resources", resources if isinstance(resources, str) else json.dumps(resources)]
    if row.get("labels"):
        found += ["--labels", labels_text(row["labels"])]
    return found


def _environ(rows: list[dict[str, Any]]) -> dict[str, str]:
    environ = dict(os.environ)
    for row in rows:  # whichever node names it, it holds for all of them
        for field, value in Config.from_system_config(row.get("_system_config") or {}).items():
            environ[f"HPCRAY_{field.upper()}"] = str(int(value) if isinstance(value, bool) else value)
    environ.pop("HPCRAY_ADDRESS", None)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = environ.get("PYTHONPATH", "").split(os.pathsep)
    if root not in paths:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, root]))
    return environ


def _drive(directory: str) -> None:
    """Write the address of the job to a file, then wait for the end of the pipe, both in `directory`."""
    path = os.path.join(directory, _ADDRESS_FILE)
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(os.environ["HPCRAY_ADDRESS"])
    os.replace(path + ".new", path)
    try:
        with open(os.path.join(directory, _LIFE_FIFO), "rb") as life:
            life.read()
    except FileNotFoundError:
        pass  # the parent has removed the directory


if __name__ == "__main__":
    _drive(sys.argv[1])
