"""`ray.cluster_utils.Cluster`: several nodes on this host, for tests of programs that want more than one.

A job of hpcray has the nodes that its launcher starts. So `add_node` only collects nodes, and mpirun starts all of them
at the first use of `address`, `connect()` or `wait_for_nodes()`. The driver of rank 0, this module as a program,
publishes the address and waits until this process closes a pipe or dies; this process joins as a second driver.
"""

from __future__ import annotations

import atexit
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
from hpcray.api.session import init, is_initialized, shutdown
from hpcray.common.config import Config
from hpcray.common.exceptions import StartupError
from hpcray.launch.launch_line import find_mpirun
from hpcray.platform.session_directory import SessionInfo, live_sessions, read_session

_SHUTDOWN_TIMEOUT = 15.0  # seconds until the launcher is killed
_START_MARGIN = 10.0  # seconds beyond the setting `start_timeout`
_POLL_INTERVAL = 0.02  # seconds
_OBJECT_STORE_BYTES = 150 << 20  # of a node
_ADDRESS_FILE = "address"
_LIFE_FIFO = "life"
_FLAGS = {"num_cpus": "--num-cpus", "num_gpus": "--num-gpus", "memory": "--memory"}
_WITHOUT_EFFECT = ("include_dashboard", "dashboard_host", "dashboard_port", "redis_password", "node_ip_address")


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

    @property
    def node_id(self) -> str:
        """Id of the node, as in `nodes()`. Starts the cluster."""
        return self._cluster._info(self).node_id

    unique_id = node_id

    @property
    def address(self) -> str:
        """Address of the job, for `init(address=...)`. Starts the cluster."""
        return self._cluster.address

    def get_session_dir_path(self) -> str:
        """Session directory of the node. Starts the cluster."""
        return self._cluster._info(self).path

    def kill_raylet(self) -> None:
        """Kill the raylet of the node with SIGKILL, which looks like the loss of a machine."""
        os.kill(self._cluster._info(self).pid, signal.SIGKILL)

    def __repr__(self) -> str:
        return f"ClusterNode({self._index}, {self._options})"


class Cluster:
    """Several raylets on this host. Nodes can be added until the cluster is used.

    Args:
        initialize_head: add the head node.
        connect: start the cluster and join it; no node can be added afterwards.
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
        self._session = ""
        self._infos: dict[int, SessionInfo] = {}
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
            wait: without effect: all nodes start together.
            node_args: num_cpus (1), num_gpus (0), memory, object_store_memory (150 MiB), resources.

        Raises:
            NotImplementedError: the cluster is running. ValueError: an option is unknown.
        """
        if self._launcher is not None:
            raise NotImplementedError(
                "Cluster.add_node(): this cluster runs, and no node can join a running job; hint: add all nodes before "
                "connect(), init(address=cluster.address) or wait_for_nodes()"
            )
        known = {*_FLAGS, "object_store_memory", "resources", *_WITHOUT_EFFECT}
        unknown = [name for name in node_args if name not in known and not name.startswith("_")]
        if unknown:
            raise ValueError(f"Cluster.add_node() does not know {unknown}; hint: it takes {sorted(known)}")
        options = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": _OBJECT_STORE_BYTES, **node_args}
        node = ClusterNode(self, len(self._nodes), options)
        self._nodes.append(node)
        return node

    def remove_node(self, node: ClusterNode, allow_graceful: bool = True) -> None:
        """Remove a node. Where the cluster is running, the raylet of the node is killed.

        Raises:
            ValueError: the node is the running head, or belongs to another cluster.
        """
        if node not in self._nodes or node._index in self._removed:
            raise ValueError(f"{node} is no node of this cluster")
        if self._launcher is None:
            self._nodes.remove(node)
            for index, left in enumerate(self._nodes):
                left._index = index
            return
        if node._index == 0:
            raise ValueError("the head cannot be removed from a cluster that runs; hint: shutdown()")
        node.kill_raylet()
        self._removed.add(node._index)

    @property
    def head_node(self) -> ClusterNode | None:
        """The head node; None in a cluster without nodes."""
        return self._nodes[0] if self._nodes else None

    @property
    def worker_nodes(self) -> set[ClusterNode]:
        """All nodes but the head, without those that were removed."""
        return {node for node in self._nodes[1:] if node._index not in self._removed}

    def list_all_nodes(self) -> list[ClusterNode]:
        """All nodes that were not removed."""
        return [node for node in self._nodes if node._index not in self._removed]

    @property
    def address(self) -> str:
        """Address for `init(address=...)`. Starts the nodes."""
        self._start()
        return self._address

    gcs_address = address

    def connect(self, namespace: str | None = None) -> None:
        """Join the cluster as a driver. Starts the nodes."""
        init(self.address, namespace=namespace, ignore_reinit_error=True)
        self.connected = True

    def wait_for_nodes(self, timeout: float = 30) -> None:
        """Wait until as many nodes are alive as were added and not removed. Starts the nodes.

        Args:
            timeout: in seconds.

        Raises:
            TimeoutError: the number of live nodes differs after `timeout`.
        """
        self._start()
        if not is_initialized():
            return  # the head has started its driver: all nodes are up
        expected = len(self.list_all_nodes())
        deadline = time.monotonic() + timeout
        while (alive := sum(row["Alive"] for row in nodes())) != expected:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{alive} nodes are alive after {timeout:g} s, not {expected}")
            time.sleep(_POLL_INTERVAL)

    def shutdown(self) -> None:
        """Leave the job if this process has joined it, and stop all nodes."""
        atexit.unregister(self.shutdown)
        if self.connected:
            self.connected = False
            shutdown()
        if self._launcher is None:
            return
        os.close(self._life)
        self._life = -1
        try:
            self._launcher.wait(_SHUTDOWN_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._launcher.kill()  # every raylet sees that its parent is gone
            self._launcher.wait()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._launcher = None
        self._nodes, self._removed, self._address, self._infos = [], set(), "", {}

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
            _line(mpirun, [node._options for node in self._nodes], self._directory),
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
        deadline = time.monotonic() + Config.from_env(os.environ).start_timeout + _START_MARGIN
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
        if node._index not in self._infos:
            self._infos.update({info.node: info for info in live_sessions() if info.session == self._session})
        return self._infos[node._index]


def _line(mpirun: str, rows: list[dict[str, Any]], directory: str) -> list[str]:
    """Build the mpirun command: one rank for each node, each with its own options."""
    line = [mpirun, *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    # Without recovery the loss of one rank would end all of them.
    line += ["--enable-recovery", "--bind-to", "none", "--map-by", "node:OVERSUBSCRIBE"]
    for index, row in enumerate(rows):
        line += [":"] if index else []
        line += ["-n", "1", sys.executable, "-m", "hpcray", *_options(row)]
        line += ["-m", "hpcray.compat.cluster_utils", directory]
    return line


def _options(row: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for name, flag in _FLAGS.items():
        if row.get(name) is not None:
            found += [flag, f"{row[name]:g}"]
    if row.get("object_store_memory") is not None:
        found += ["--object-store-memory", str(int(row["object_store_memory"]))]
    resources = row.get("resources")
    if resources:
        found += ["--resources", resources if isinstance(resources, str) else json.dumps(resources)]
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
