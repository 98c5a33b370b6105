"""The directory by which this user's `ray start` commands know of each other: a file for each cluster, with its secret,
and one for each command, which says how far it is. The nodes share it.

    <ident>.cluster      the join token of the cluster, and the `StartedCluster`; removed when the head ends
    <ident>.call         a `StartCall`; removed when its node ends in order

A node that runs also says so in its session directory, for programs and commands of its host, which need no shared
directory: `ray_start.json`, a `StartedNode`. A command that has failed and could not use the directory leaves its
`StartCall` beside the session directories of its host: `call-<ident>/ray_start.failed`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from hpcray.common.exceptions import StartupError
from hpcray.platform.private_files import CLOSED, PrivateDirectory, read_private_file, write_private_file
from hpcray.platform.process_tree import ProcessIdentity
from hpcray.platform.session_directory import live_sessions, session_root
from hpcray.ray_start.clusters import StartedCluster, StartedNode
from hpcray.ray_start.presence import NODE_FILE, REFUSED_FILE, start_directory

_HINT = "hint: HPCRAY_START_DIR names another directory, of yours alone, that all nodes see"
STARTING, UP, FAILED = "starting", "up", "failed"
_CLUSTER, _CALL = ".cluster", ".call"
_REFUSED = "call-"
_KEPT = 7 * 86400.0
"""Seconds after which the file of a command that has failed, or was killed, is removed."""


def open_start_directory(path: str, make: bool) -> PrivateDirectory:
    """Open the directory: only this user can enter it, and no other can exchange one above.

    Raises:
        StartupError: it cannot be used; the message says why.
    """
    try:
        return PrivateDirectory.open(path, make, CLOSED, ancestors=True)
    except OSError as error:
        raise StartupError(f"{path} cannot keep the secrets of clusters: {error}; {_HINT}") from None


class StartCall(msgspec.Struct, frozen=True, kw_only=True):
    """One `ray start`, from its beginning to the end of its node.

    Attributes:
        ident: of its file, and of the cluster whose head it is.
        command: its command line.
        allocation: the batch job around it; "" where none is known.
        host, pid, started: of the process that holds the node; `started` in clock ticks since boot.
        machine: what sees the process by this pid: a boot of the host, and a PID namespace in it.
        begun: Unix time.
        state: STARTING, UP or FAILED.
        reason: why it has failed.
        cluster: `ident` of its cluster, once it is known.
        in_step: whether Slurm kills it at the end of its step.
        session_dir: of its node, once that is up.
    """

    ident: str
    command: str
    allocation: str
    host: str
    pid: int
    started: int
    machine: str
    begun: float
    state: str = STARTING
    reason: str = ""
    cluster: str = ""
    in_step: bool = False
    session_dir: str = ""

    def is_gone(self) -> bool:
        """True if the process has ended, as far as that can be seen from this host."""
        boot, _, namespace = self.machine.partition(" ")
        here, _, own = machine_id().partition(" ")
        if self.host != socket.gethostname() or (boot == here and namespace != own):
            return False
        found = ProcessIdentity.of(self.pid)
        return boot != here or found is None or found.started != self.started


class _ClusterFile(msgspec.Struct, frozen=True):
    """The part of a cluster's file that the join token has not."""

    cluster: StartedCluster


class KnownCluster(msgspec.Struct, frozen=True):
    """A cluster in the directory, and the path of its file, which is its join token too."""

    cluster: StartedCluster
    path: str


class Registry:
    """The directory's content.

    Args:
        environ: the environment, which names the directory.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.path = start_directory(environ)
        self._environ = environ

    def write_cluster(self, cluster: StartedCluster, join_token: bytes) -> None:
        """Let others find a cluster.

        Raises:
            StartupError, OSError: the directory cannot be used.
        """
        known = msgspec.json.decode(join_token)
        with open_start_directory(self.path, make=True) as place:
            place.write(cluster.ident + _CLUSTER, msgspec.json.encode({**known, "cluster": cluster}))

    def path_of(self, ident: str) -> str:
        """The path of a cluster's file."""
        return os.path.join(self.path, ident + _CLUSTER)

    def clusters(self) -> list[KnownCluster]:
        """All clusters whose heads have not ended in order.

        Raises:
            StartupError: the directory is not this user's alone.
        """
        return [
            KnownCluster(found.cluster, os.path.join(self.path, name))
            for name, found in self._files(_CLUSTER, _ClusterFile)
        ]

    def calls(self, allocation: str) -> list[StartCall]:
        """The `ray start` commands of an allocation; outside of one those of this host that run.

        Raises:
            StartupError: the directory is not this user's alone.
        """
        found = [call for _, call in self._files(_CALL, StartCall) if call.allocation == allocation]
        if allocation:
            return found
        host = socket.gethostname()
        return [call for call in found if call.host == host and call.state != FAILED and not call.is_gone()]

    def sessions_here(self) -> list[str]:
        """The session directories of this host's nodes, as their commands have noted them.

        Raises:
            StartupError: the directory cannot be used.
        """
        here = (socket.gethostname(), machine_id())
        calls = [call for _, call in self._files(_CALL, StartCall) if (call.host, call.machine) == here]
        return [call.session_dir for call in calls if call.session_dir and not call.is_gone()]

    def _files(self, ending: str, kind: type[msgspec.Struct]) -> Iterable[tuple[str, Any]]:
        if not os.path.isdir(self.path):
            return []
        found = []
        with open_start_directory(self.path, make=False) as place:
            for name in place.names():
                if name.endswith(ending) and not name.startswith("."):
                    with contextlib.suppress(OSError, msgspec.MsgspecError):  # it was removed a moment ago
                        found.append((name, msgspec.json.decode(place.read(name, CLOSED), type=kind)))
        return found

    def write_call(self, call: StartCall) -> None:
        """Say how far a command is. Where the directory cannot be used, programs of this host learn why it failed."""
        text = msgspec.json.encode(call)
        try:
            with open_start_directory(self.path, make=True) as place:
                place.write(call.ident + _CALL, text)
        except (StartupError, OSError):
            if call.state == FAILED:
                path = os.path.join(session_root(self._environ), _REFUSED + call.ident)
                with contextlib.suppress(OSError), PrivateDirectory.open(path, True, CLOSED, ancestors=True) as place:
                    place.write(REFUSED_FILE, text)

    def refused(self, allocation: str) -> list[StartCall]:
        """The commands of an allocation on this host that could not use the directory."""
        return [call for _, call in self._refused_files() if call.allocation == allocation]

    def _refused_files(self) -> list[tuple[str, StartCall]]:
        found = []
        root = session_root(self._environ)
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(root)):
                if name.startswith(_REFUSED):
                    with (
                        contextlib.suppress(OSError, msgspec.MsgspecError),
                        PrivateDirectory.open(os.path.join(root, name), False, CLOSED, ancestors=True) as place,
                    ):
                        text = place.read(REFUSED_FILE, CLOSED)
                        found.append((place.path, msgspec.json.decode(text, type=StartCall)))
        return found

    def remove_call(self, ident: str) -> None:
        """The node of a command has ended in order."""
        self._remove(ident + _CALL)

    def remove_cluster(self, ident: str) -> None:
        """The cluster has ended."""
        self._remove(ident + _CLUSTER)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(StartupError, OSError), open_start_directory(self.path, make=False) as place:
            place.remove(name)

    def sweep(self, allocation: str, reasons: bool = True) -> None:
        """Remove what killed processes of this host have left. Commands of the allocation that have failed or ended
        keep their reasons until the allocation has another one on this host.

        Args:
            reasons: whether those of commands that have failed go, too.
        """
        host, now = socket.gethostname(), time.time()
        for path, call in self._refused_files():
            if reasons and (call.allocation == allocation or now - call.begun > _KEPT):
                shutil.rmtree(path, ignore_errors=True)
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.dirname(path))
        with contextlib.suppress(StartupError, OSError):
            for _, call in self._files(_CALL, StartCall):
                gone = call.is_gone()
                if gone:
                    self.remove_cluster(call.ident)  # a secret of nothing
                over = gone or (reasons and call.state == FAILED)
                mine = call.host == host and (call.allocation == allocation or not call.allocation)
                if over and (mine or now - call.begun > _KEPT):
                    self.remove_call(call.ident)


def machine_id() -> str:
    """An identification of the boot of this host, and of the PID namespace of this process."""
    boot = namespace = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{boot} {namespace}"


def publish_node(node: StartedNode) -> None:
    """Let programs and commands of this host find a node."""
    write_private_file(os.path.join(node.session_dir, NODE_FILE), msgspec.json.encode(node))


def nodes_here(environ: Mapping[str, str]) -> list[StartedNode]:
    """The started nodes of this user on this host, the cluster that came last first; at last those that lie in another
    temporary directory, as where a step, but not the batch script, has a TMPDIR of its own."""
    found = [info.path for info in live_sessions(environ)]
    with contextlib.suppress(StartupError):
        found += [path for path in Registry(environ).sessions_here() if path not in found]
    return [node for path in found if (node := _read_node(path)) is not None]


def _read_node(session_dir: str) -> StartedNode | None:
    try:
        return msgspec.json.decode(read_private_file(os.path.join(session_dir, NODE_FILE)), type=StartedNode)
    except (OSError, msgspec.MsgspecError):
        return None
