"""How `ray start --address` looks for its head: in the directory of secrets, at its bell, and through Slurm."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from hpcray.common.exceptions import StartupError
from hpcray.platform.allocation import expand_nodes, run_command
from hpcray.platform.config_files import launch_config
from hpcray.platform.launcher_environment import outside_of_job
from hpcray.platform.process_control import module_line
from hpcray.ray_start.clusters import (
    Asker,
    ClusterName,
    SeveralClustersError,
    StartedCluster,
    clusters_named,
    parse_cluster_name,
)
from hpcray.ray_start.registry import KnownCluster, Registry, nodes_here
from hpcray.ray_start.surroundings import addresses_of, own_names, resolve
from hpcray.runtime.node.join_token import SILENT

# ------------------------------------------------------------ bell
# The bell of a head: a TCP port that accepts, reads nothing, says nothing and closes, for scripts that test it.


_BACKLOG = 512
_LISTEN_ON = "0.0.0.0"
_PATIENCE = 1.0  # seconds
NOTHING, BELL, STRANGER = "nothing", "bell", "stranger"


class Bell:
    """The listener. `serve` answers those who wait.

    Args:
        port: where; 0: one that is free.

    Attributes:
        port: where it listens.

    Raises:
        OSError: the port is taken, or may not be opened.
    """

    def __init__(self, port: int) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((_LISTEN_ON, port))
            self._socket.listen(_BACKLOG)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def fileno(self) -> int:
        """The descriptor, for `select.poll`."""
        return self._socket.fileno()

    def serve(self) -> None:
        """Close each connection that waits."""
        for _ in range(_BACKLOG):
            try:
                self._socket.accept()[0].close()
            except OSError:
                return

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()


def who_listens(host: str, port: int) -> str:
    """Return what listens at a port: nothing, a bell, or a stranger, which keeps the connection or says something."""
    try:
        with socket.create_connection((host, port), timeout=_PATIENCE) as line:
            return STRANGER if line.recv(1) else BELL
    except TimeoutError:
        return STRANGER if _connects(host, port) else NOTHING
    except OSError:
        return NOTHING


def _connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_PATIENCE).close()
    except OSError:
        return False
    return True


# ------------------------------------------------------------ through Slurm
# A step on the head's host, which says that a head is up that has no bell, and whose file does not come. Nodes whose
# homes are their own never see the secret of their head. Only where the directory of secrets is on a file system of
# this host alone is there reason to suspect that, and so a step is started for it. The head may be in another job, and
# a job may have a /tmp of its own, so each job of this user's on that host is looked into.

_SHARED = (
    "9p", "afs", "beegfs", "ceph", "cifs", "dvs", "fuse", "glusterfs", "gpfs", "lustre", "nfs", "orangefs", "panfs",
    "pvfs2", "smb", "wekafs",
)  # fmt: skip
"""Beginnings of the names of file systems that hosts share."""
_LOOK = 0.3
_LONGEST = 600.0
_TIMEOUT = 10.0
_MOST_STEPS = 4


def is_of_this_host(path: str, mounts: str = "/proc/self/mounts") -> bool:
    """True if a path is on a file system that other hosts do not share, as far as its kind says."""
    path, best, kind = os.path.realpath(path), "", ""
    with contextlib.suppress(OSError), open(mounts, encoding="utf-8", errors="replace") as file:
        for line in file:
            _, place, found, *_ = line.split(" ")
            place = place.replace("\\040", " ")
            if os.path.commonpath([path, place]) == place and len(place) >= len(best):
                best, kind = place, found
    return bool(kind) and not kind.startswith(_SHARED)


class HeadProbe:
    """Steps that look for the head, one in each job of this user's that may have its host.

    Args:
        name: H:P of the cluster.
        allocation: the batch job around this node. environ: of this process.
    """

    def __init__(self, name: ClusterName, allocation: str, environ: Mapping[str, str]) -> None:
        self._name, self._allocation, self._environ = name, allocation, environ
        self._steps: dict[str, subprocess.Popen[bytes]] = {}  # by Slurm's id of the job

    def look(self) -> None:
        """Start a step in each of these jobs that has none: the head's job may begin later than this node's."""
        names = {self._name.host, *resolve(self._name.host), *_names_of(self._name.host)}
        jobs = [(job, nodes) for job, nodes in _own_jobs(self._allocation, self._environ) if nodes]
        found = [(job, node) for job, nodes in jobs if (node := node_of(names, nodes))]
        # An address of another network may be known on its own host only, and that is mostly the first of its job.
        for job, node in found or [(job, nodes[0]) for job, nodes in jobs]:
            running = [known for known, step in self._steps.items() if step.poll() is None]
            if job not in running and len(running) < _MOST_STEPS and node not in own_names():
                self._steps[job] = self._start(job, node)

    def _start(self, job: str, node: str) -> subprocess.Popen[bytes]:
        line = ["srun", f"--jobid={job}", f"--nodelist={node}", "--overlap", "--nodes=1", "--ntasks=1", "--quiet"]
        line += ["--mpi=none", "--export=ALL", *module_line(__name__, self._name.text)]
        null = subprocess.DEVNULL
        return subprocess.Popen(
            line, env=outside_of_job(os.environ), stdin=null, stdout=null, stderr=null, start_new_session=True
        )

    @property
    def is_up(self) -> bool:
        """True once a step has found the head."""
        return any(step.poll() == 0 for step in self._steps.values())

    def close(self) -> None:
        """End the steps."""
        running = [step for step in self._steps.values() if step.poll() is None]
        for step in running:
            step.terminate()
        for step in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                step.wait(_TIMEOUT)


def node_of(names: Collection[str], nodes: Sequence[str]) -> str:
    """The node of Slurm's that has one of these names and addresses, "" for none. Names of other networks begin with
    that of the node: `n1-ib0`, `n1.fabric`, `n1i`."""
    for node in nodes:
        if any(name.startswith(node) and not name[len(node) : len(node) + 1].isdigit() for name in names):
            return node
    return next((node for node in nodes if set(names) & set(addresses_of(node))), "")


def _names_of(host: str) -> list[str]:
    """The names that the system knows for an address."""
    try:
        name, more, _ = socket.gethostbyaddr(host)
    except OSError:
        return []
    return [name, *more]


def _own_jobs(allocation: str, environ: Mapping[str, str]) -> list[tuple[str, Sequence[str]]]:
    """The running Slurm jobs of this user, that around this process first, and the names of their nodes. The head may
    be in another job than its workers."""
    kind, _, own = allocation.partition("-")
    try:
        said = run_command(["squeue", "--noheader", "--me", "--states=RUNNING", "--format=%A %N"], _TIMEOUT)
        said.check_returncode()
        found = [(job, expand_nodes(names)) for job, names in map(str.split, said.stdout.splitlines())]
    except (OSError, subprocess.SubprocessError, ValueError):
        if kind != "slurm" or environ.get("SLURM_JOB_ID") != own:
            return []
        with contextlib.suppress(ValueError):
            return [(own, expand_nodes(environ.get("SLURM_JOB_NODELIST", "")))]
        return []
    return sorted(found, key=lambda row: row[0] != own)


def _look(text: str) -> bool:
    """Look on this host until a head of that name is up."""
    name = parse_cluster_name(text)
    assert name is not None
    deadline = time.monotonic() + _LONGEST
    while time.monotonic() < deadline:
        asker = Asker("", frozenset(own.lower() for own in own_names()), frozenset(resolve(name.host)))
        if clusters_named(name, [node.cluster for node in nodes_here(os.environ) if node.head], asker):
            return True
        time.sleep(_LOOK)
    return False


# ------------------------------------------------------------ head search


_PAUSE = 0.2
_BELL_INTERVAL = 1.0
_RESOLVE_INTERVAL = 5.0
_AFTER_BELL, _AFTER_PROBE = 4.0, 1.5
"""Seconds after the head is known to be up in which its file has to be seen: shared file systems may be late, and those
of one host, for which a step is started, are not."""
_TRIES = 3
_FIRST_WORD = 5.0
_OTHERS_AFTER = 60.0
"""Seconds in which a node waits for a head of its own job where another job has one of that name on the same host."""
_PROBE_AFTER, _PROBE_AGAIN = 2.0, (4.0, 20.0)
"""Seconds without a bell after which steps of Slurm's look for a head whose file cannot come; and until other jobs of
this user's that may have its host are looked for, at first and later."""
_RAYS_LIMITS = {
    "RAY_NUM_REDIS_GET_RETRIES": 1.0,
    "RAY_gcs_rpc_server_connect_timeout_s": 1.0,
    "RAY_gcs_rpc_server_reconnect_timeout_s": 1.0,
    "RAY_raylet_start_wait_time_s": 1.0,
}
"""Variables of Ray's that say how long a node waits, with the seconds of one unit. A longer wait counts."""


def longest_wait(environ: Mapping[str, str], ours: float) -> float:
    """Seconds that a node waits for its head."""
    found = [ours]
    for name, unit in _RAYS_LIMITS.items():
        try:
            found.append(float(environ.get(name, "")) * unit)
        except ValueError:
            continue
    return max(found)


class HeadSearch:
    """The search of one node for its cluster.

    Args:
        address: H:P, or "auto".
        allocation: the batch job around this node.
        log: called with lines about what happens.
    """

    def __init__(
        self, registry: Registry, address: str, allocation: str, environ: Mapping[str, str], log: Callable[[str], None]
    ) -> None:
        self._registry, self._address, self._allocation, self._log = registry, address, allocation, log
        self._name = parse_cluster_name(address)
        self._names = frozenset(name.lower() for name in own_names())
        self._resolved: frozenset[str] = frozenset()
        self._begun = self._now = time.monotonic()
        self._limit = longest_wait(environ, launch_config(environ).head_wait)
        self._next_resolve = self._next_bell = 0.0
        self._up_since = float("inf")
        self._stranger = False
        self._told = False
        self._silent: dict[str, str] = {}  # clusters whose heads do not answer, and why
        self._tries: dict[str, int] = {}
        self._environ = environ
        self._next_probe = self._begun + _PROBE_AFTER
        self._probe: HeadProbe | None = None
        if (
            self._name is not None
            and not self._name.is_local
            and shutil.which("srun")
            and is_of_this_host(registry.path)
        ):
            self._probe = HeadProbe(self._name, allocation, environ)

    def next(self) -> KnownCluster | None:
        """The cluster to join; None while there is none.

        Raises:
            StartupError: there will be none, or the time is up. SeveralClustersError: more than one could be meant.
        """
        self._now = now = time.monotonic()
        if self._name is not None and not self._name.is_local and now >= self._next_resolve:
            self._next_resolve = now + _RESOLVE_INTERVAL
            self._resolved = frozenset(resolve(self._name.host))
        found = [known for known in self._known() if known.cluster.ident not in self._silent]
        if found and (now - self._begun > _OTHERS_AFTER or not self._awaits_own(found[0].cluster)):
            return self._one_of(found)
        if found:
            self._up_since = float("inf")  # what is up there is the other job's, and its file is here
        else:
            self._listen(now)
        waited = now - self._begun
        probed = self._probe is not None and self._probe.is_up
        if now - self._up_since > (_AFTER_PROBE if probed else _AFTER_BELL):
            how = "on its host" if probed else "a bell answers there, which may also be another user's"
            raise StartupError(
                f"a head is up at {self._address} ({how}), and {self._registry.path}, where this node looked for its "
                f"secret, has no file of it{self._of_silent()}; hint: HPCRAY_START_DIR names a directory of yours, of "
                "mode 700, that all nodes see"
            )
        if waited > self._limit:
            raise StartupError(
                f"no cluster {self._address} was found within {self._limit:.0f} s in {self._registry.path}"
                f"{self._of_silent()}{self._of_stranger()}; hint: has `ray start --head` begun, by the same user, and "
                "does HPCRAY_START_DIR (or the home) lie on a file system that all nodes see?"
            )
        if waited > _FIRST_WORD and not self._told:
            self._told = True
            self._log(
                f"waiting for the head {self._address}, up to {self._limit:.0f} s; looking in {self._registry.path}"
                f"{self._of_stranger()}"
            )
        return None

    def close(self) -> None:
        """Nothing more is looked for."""
        if self._probe is not None:
            self._probe.close()

    def pause(self) -> None:
        """Wait a moment before the next look."""
        time.sleep(_PAUSE)

    def failed(self, known: KnownCluster, error: StartupError) -> None:
        """Joining a cluster has failed.

        Raises:
            StartupError: it is no use to try it again.
        """
        ident = known.cluster.ident
        if SILENT in str(error):
            self._silent[ident] = f"{known.cluster.line()}: {error}"
            self._log(f"{self._silent[ident]}; looking for another head of that name")
            return
        self._tries[ident] = self._tries.get(ident, 0) + 1
        if self._tries[ident] >= _TRIES or "does not let this node join" in str(error):
            raise error
        self._log(f"{error}; trying again")
        self.pause()

    def _awaits_own(self, found: StartedCluster) -> bool:
        """True if a cluster is another job's on a host of this one, which will have a head of that name there."""
        if not self._allocation or found.allocation in ("", self._allocation):
            return False
        try:
            hosts = expand_nodes(self._environ.get("SLURM_JOB_NODELIST", ""))
        except ValueError:
            return False
        return bool({name.lower() for name in found.names} & {host.lower() for host in hosts})

    def _known(self) -> list[KnownCluster]:
        known = {found.cluster.ident: found for found in self._registry.clusters()}
        clusters = [found.cluster for found in known.values()]
        asker = Asker(self._allocation, self._names, self._resolved)
        if self._name is None:
            own = [cluster for cluster in clusters if not self._allocation or cluster.allocation == self._allocation]
            return [known[cluster.ident] for cluster in own]
        return [known[cluster.ident] for cluster in clusters_named(self._name, clusters, asker)]

    def _one_of(self, found: list[KnownCluster]) -> KnownCluster:
        """The newest of this allocation; of others the only one whose head answers."""
        if len(found) == 1 or (self._allocation and found[0].cluster.allocation == self._allocation):
            return found[0]
        from hpcray.ray_start.challenge import answers  # loads UCX

        alive = [known for known in found if answers(known.path)]
        if len(alive) > 1:
            raise SeveralClustersError(self._address, [known.cluster for known in alive])
        for known in found:
            if known not in alive:
                self._silent[known.cluster.ident] = f"{known.cluster.line()}: its head does not answer"
        return alive[0] if alive else found[0]

    def _listen(self, now: float) -> None:
        """Try the head's bell."""
        if self._name is None or now < self._next_bell or self._up_since != float("inf"):
            return
        self._next_bell = now + _BELL_INTERVAL
        if self._probe is not None and self._probe.is_up:
            self._up_since = now
            return
        if self._probe is not None and now >= self._next_probe:
            early, late = _PROBE_AGAIN
            self._next_probe = now + (early if now - self._begun < 60.0 else late)
            self._probe.look()
        found = who_listens(self._name.host, self._name.port)
        self._stranger = found == STRANGER
        if found == BELL:
            self._up_since = now

    def _of_stranger(self) -> str:
        return f"; something else listens at {self._address}, which is no head of hpcray's" if self._stranger else ""

    def _of_silent(self) -> str:
        return "; known are " + "; ".join(self._silent.values()) if self._silent else ""


if __name__ == "__main__":
    sys.exit(0 if _look(sys.argv[1]) else 1)
