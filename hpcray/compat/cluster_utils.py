"""`ray.cluster_utils.Cluster`: several nodes on this host, for tests of programs that want more than one.

A job of hpcray has the nodes that its launcher starts. So nodes are collected first, and mpirun starts all of them when
somebody wants the cluster: at `address`, `connect()` or `wait_for_nodes()`. Rank 0's driver is a program that waits
until this process closes a pipe or dies (`hpcray.compat.keeper`); this process joins as a second driver.
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

from hpcray.api.context import nodes
from hpcray.api.session import init, is_initialized, shutdown
from hpcray.base.config import Config
from hpcray.base.failures import StartupError
from hpcray.cluster.launch import find_mpirun
from hpcray.compat.keeper import ADDRESS_FILE, LIFE_FIFO
from hpcray.host.session import SessionInfo, live_sessions, read_session

_LEAVING = 15.0
_MARGIN = 10.0
_POLL = 0.02
_STORE = 150 << 20
_FLAGS = {"num_cpus": "--num-cpus", "num_gpus": "--num-gpus", "memory": "--memory"}
_WITHOUT_EFFECT = ("include_dashboard", "dashboard_host", "dashboard_port", "redis_password", "node_ip_address")


class ClusterNode:
    """A node of a `Cluster`.

    Args:
        index: its place in the order of `add_node`.
        options: what it was added with.
    """

    def __init__(self, cluster: Cluster, index: int, options: dict[str, Any]) -> None:
        self._cluster = cluster
        self._index = index
        self._options = options

    @property
    def node_id(self) -> str:
        """Its id, as in `nodes()`. Starts the cluster."""
        return self._cluster._info(self).node_id

    unique_id = node_id

    @property
    def address(self) -> str:
        """How to join the job."""
        return self._cluster.address

    def get_session_dir_path(self) -> str:
        """Its session directory."""
        return self._cluster._info(self).path

    def kill_raylet(self) -> None:
        """End it as a lost machine would."""
        os.kill(self._cluster._info(self).pid, signal.SIGKILL)

    def __repr__(self) -> str:
        return f"ClusterNode({self._index}, {self._options})"


class Cluster:
    """Several raylets on this host. Nodes can be added until the cluster is used.

    Args:
        initialize_head: add the first node now.
        connect: and join it. No node can be added then.
        head_node_args: of the first node, as for `add_node`.
        shutdown_at_exit: whether the nodes end with this interpreter at the latest. They do in any case.
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

    # ------------------------------------------------------------ nodes

    def add_node(self, wait: bool = True, **node_args: Any) -> ClusterNode:
        """Add a node; the first one is the head.

        Args:
            wait: no effect: all nodes come up together.
            node_args: num_cpus (1), num_gpus (0), memory, object_store_memory (150 MiB), resources.

        Raises:
            NotImplementedError: the cluster runs already. ValueError: an option is unknown.
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
        options = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": _STORE, **node_args}
        node = ClusterNode(self, len(self._nodes), options)
        self._nodes.append(node)
        return node

    def remove_node(self, node: ClusterNode, allow_graceful: bool = True) -> None:
        """Take a node away: before the start it is forgotten, after it its raylet is killed.

        Raises:
            ValueError: it is the head, or not of this cluster.
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
        """The first node."""
        return self._nodes[0] if self._nodes else None

    @property
    def worker_nodes(self) -> set[ClusterNode]:
        """The other nodes."""
        return {node for node in self._nodes[1:] if node._index not in self._removed}

    def list_all_nodes(self) -> list[ClusterNode]:
        """All nodes that were not removed."""
        return [node for node in self._nodes if node._index not in self._removed]

    # ------------------------------------------------------------ use

    @property
    def address(self) -> str:
        """For `init(address=...)`. Starts the nodes."""
        self._start()
        return self._address

    gcs_address = address

    def connect(self, namespace: str | None = None) -> None:
        """Join the cluster as a driver. Starts the nodes."""
        init(self.address, namespace=namespace, ignore_reinit_error=True)
        self.connected = True

    def wait_for_nodes(self, timeout: float = 30) -> None:
        """Wait until the living nodes are those that were added and not removed. Starts the nodes.

        Raises:
            TimeoutError: they are not within `timeout` seconds.
        """
        self._start()
        if not is_initialized():
            return  # the head has started its driver: all nodes are up
        wanted = len(self.list_all_nodes())
        deadline = time.monotonic() + timeout
        while (alive := sum(row["Alive"] for row in nodes())) != wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{alive} nodes are alive after {timeout:g} s, not {wanted}")
            time.sleep(_POLL)

    def shutdown(self) -> None:
        """End all nodes, and leave them first if this process has joined."""
        atexit.unregister(self.shutdown)
        if self.connected:
            self.connected = False
            shutdown()
        if self._launcher is None:
            return
        os.close(self._life)
        self._life = -1
        try:
            self._launcher.wait(_LEAVING)
        except subprocess.TimeoutExpired:
            self._launcher.kill()  # every raylet sees that its parent is gone
            self._launcher.wait()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._launcher = None
        self._nodes, self._removed, self._address, self._infos = [], set(), "", {}

    # ------------------------------------------------------------ inside

    def _start(self) -> None:
        if self._launcher is not None:
            return
        if not self._nodes:
            raise RuntimeError("the cluster has no nodes; hint: add_node()")
        mpirun = find_mpirun("", os.path.dirname(sys.executable))
        self._directory = tempfile.mkdtemp(prefix="hpcray-cluster-")
        life = os.path.join(self._directory, LIFE_FIFO)
        os.mkfifo(life, 0o600)
        self._life = os.open(life, os.O_RDWR)
        self._launcher = subprocess.Popen(
            _line(mpirun, [node._options for node in self._nodes], self._directory),
            stdin=subprocess.DEVNULL,
            env=_environ(),
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
        path = os.path.join(self._directory, ADDRESS_FILE)
        deadline = time.monotonic() + Config.from_env().start_timeout + _MARGIN
        while not os.path.exists(path):
            code = self._launcher.poll()
            if code is not None or time.monotonic() > deadline:
                how = "are not up in time" if code is None else f"ended (exit code {code})"
                raise StartupError(f"the {len(self._nodes)} nodes of the cluster {how}; see what was printed above")
            time.sleep(_POLL)
        with open(path, encoding="utf-8") as file:
            return file.read()

    def _info(self, node: ClusterNode) -> SessionInfo:
        self._start()
        if node._index not in self._infos:
            self._infos.update({info.node: info for info in live_sessions() if info.session == self._session})
        return self._infos[node._index]


def _line(mpirun: str, rows: list[dict[str, Any]], directory: str) -> list[str]:
    """The command: one rank for each node, each with its own options."""
    line = [mpirun, *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    # Without recovery the loss of one rank would end all of them.
    line += ["--enable-recovery", "--bind-to", "none", "--map-by", "node:OVERSUBSCRIBE"]
    for index, row in enumerate(rows):
        line += [":"] if index else []
        line += ["-n", "1", sys.executable, "-m", "hpcray", *_options(row), "-m", "hpcray.compat.keeper", directory]
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


def _environ() -> dict[str, str]:
    environ = dict(os.environ)
    environ.pop("HPCRAY_ADDRESS", None)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = environ.get("PYTHONPATH", "").split(os.pathsep)
    if root not in paths:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, root]))
    return environ
