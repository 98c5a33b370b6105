"""A nested MPI job on reserved nodes: the actors that hold its CPUs, the launcher's line, and processes that become its
ranks."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from hpcray.common.exceptions import StartupError
from hpcray.jobs import CALL, PickledCall, read_pickle, write_pickle
from hpcray.launch.launch_line import OPEN_MPI, LaunchError, find_mpirun, forwarded_options, has_mpich, protocol
from hpcray.launch.local_ranks import compose_local
from hpcray.mpi import processes
from hpcray.mpi.processes import HELD, place_file, start_mpi
from hpcray.platform.config_files import launch_config
from hpcray.platform.launcher_environment import set_mpi_variables, strip_launcher_variables
from hpcray.platform.mpi_directory import find_library
from hpcray.platform.private_files import CLOSED, make_private_directory, open_private_file, write_private_file
from hpcray.platform.process_control import module_line
from hpcray.runtime.core_worker.core_worker import current

_GUARD_EXIT_TIMEOUT = 20.0  # seconds
_HOSTFILE = "hosts"
# srun takes options from the variables of the surrounding step; it needs only the job and the cluster.
_JOB_VARIABLES = frozenset({"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TMPDIR"})


@dataclass(frozen=True)
class RankShare:
    """One node's part of the job: `ranks` ranks, numbered from `first` on; their files are in `directory` on `host`."""

    host: str
    directory: str
    first: int
    ranks: int


@dataclass(frozen=True)
class NestedMpiSite:
    """The host and the environment that a nested job starts from.

    Attributes:
        python: the interpreter of the ranks.
        environ: the environment of the worker that starts the job.
        host: its host.
        root: whether this process runs as root.
        mpirun: absolute path; "" where srun starts the ranks.
        pmix: the PMIx library with which ranks of one host start without mpirun; "" where they cannot.
        srun: srun's start-up protocol; "" where mpirun starts the ranks.
        export: variables that ranks on other hosts must have, too.
    """

    python: str
    environ: Mapping[str, str]
    host: str
    root: bool = False
    mpirun: str = ""
    pmix: str = ""
    srun: str = ""
    export: Sequence[str] = field(default_factory=tuple)


def compose(shares: Sequence[RankShare], site: NestedMpiSite, role: str = "rank") -> list[str]:
    """The launcher's line. Pure.

    Args:
        shares: where the ranks are.
        site: where the launcher is.
        role: what a process of the job does, a command of `hpcray.mpi.processes`: "rank" or "place".
    """
    hosts = list(dict.fromkeys(share.host for share in shares))
    parts = [(share.directory, share.first, share.ranks) for share in shares]
    spec = {"shares": parts, "srun": bool(site.srun), "one_host": len(hosts) == 1}
    command = module_line(processes.__name__, role, json.dumps(spec, separators=(",", ":")), python=site.python)
    ranks = str(sum(share.ranks for share in shares))
    if site.srun:
        # Each rank where hpcray has reserved its CPUs, beside the step that hpcray itself is; one that fails ends all.
        line = ["srun", f"--mpi={site.srun}", "--overlap", "-N", str(len(hosts)), "-n", ranks, "--overcommit"]
        line += ["--distribution=arbitrary", "--kill-on-bad-exit=1", "--export=ALL"]
        # The CPUs are hpcray's to share out. A Slurm that does not bind its tasks would complain each time.
        if "SLURM_CPU_BIND" in site.environ or "SLURM_STEP_ID" not in site.environ:
            line.append("--cpu-bind=none")
        return [*line, *command]
    if site.pmix and hosts == [site.host]:
        return compose_local(site.python, int(ranks), site.pmix, False, command)
    line = [site.mpirun, *(["--allow-run-as-root"] if site.root else [])]
    if hosts == [site.host]:
        line += ["--host", "localhost", "-n", ranks, "--map-by", "node:OVERSUBSCRIBE"]
        # Its session directory, too, goes with the job.
        line += ["--prtemca", "prte_tmpdir_base", shares[0].directory]
    else:
        slots = {host: sum(share.ranks for share in shares if share.host == host) for host in hosts}
        line += ["--host", ",".join(f"{host}:{count}" for host, count in slots.items()), "-n", ranks]
        line += ["--map-by", "slot:OVERSUBSCRIBE"]
        line += forwarded_options(set(site.environ) - {"HPCRAY_CONSOLE"}, site.export)
    return [*line, "--bind-to", "none", *command]


def hostfile(shares: Sequence[RankShare]) -> str:
    """One line per rank, as srun's arbitrary distribution needs it."""
    return "".join(f"{share.host}\n" * share.ranks for share in shares)


def launch_environ(environ: Mapping[str, str], env: Mapping[str, str], cpus_per_rank: float) -> dict[str, str]:
    """The launcher's environment: this worker's, without the variables of the outer job's launcher."""
    found = {name: value for name, value in environ.items() if not name.startswith(("SLURM_", "SRUN_"))}
    found |= {name: environ[name] for name in _JOB_VARIABLES if name in environ}
    strip_launcher_variables(found)
    found.pop("HPCRAY_CONSOLE", None)
    found["OMP_NUM_THREADS"] = str(max(1, int(cpus_per_rank)))
    return {**found, **env}


def probe_mpi_site(environ: Mapping[str, str], env: Mapping[str, str]) -> NestedMpiSite:
    """Examine this worker's site.

    Raises:
        LaunchError: there is no mpirun.
    """
    by_srun = bool(environ.get("SLURM_JOB_ID")) and shutil.which("srun") is not None
    mpirun = "" if by_srun else find_mpirun("", os.path.dirname(sys.executable))
    chosen = launch_config(environ).launcher == OPEN_MPI
    return NestedMpiSite(
        python=sys.executable,
        environ=environ,
        host=own_host(environ),
        root=os.geteuid() == 0,
        mpirun=mpirun,
        pmix=find_library(mpirun) if mpirun and not chosen else "",
        srun=protocol(environ, has_mpich()) if by_srun else "",
        export=tuple(env),
    )


def own_host(environ: Mapping[str, str]) -> str:
    """The name of this host, as the launcher knows it."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


class RankHolder:
    """Holds the CPUs of some ranks of a job on one node; an actor, whose death ends them.

    `prepare` first; then, on one of the job's holders, `launch`; then `collect`; `close` at any time.
    """

    def __init__(self) -> None:
        self._directory = Path()
        self._guard: subprocess.Popen[bytes] | None = None

    def prepare(self, token: str, call: bytes = b"") -> tuple[str, str]:
        """Make this node ready; its host and directory.

        Args:
            token: names the job.
            call: a pickled `PickledCall`; b"" where the processes only hold the places of ranks.
        """
        assert current.process is not None
        self._directory = Path(current.process.place.session_dir) / f"mpi-{token}"
        make_private_directory(str(self._directory), CLOSED, ancestors=True)
        if call:
            loaded: PickledCall = pickle.loads(call)
            write_pickle(self._directory / CALL, loaded)
        reply_read, reply_write = os.pipe()
        self._replies = open(reply_read, "rb")  # noqa: SIM115
        try:
            self._guard = subprocess.Popen(
                module_line(processes.__name__, "guard", str(self._directory), str(reply_write)),
                stdin=subprocess.PIPE,
                pass_fds=(reply_write,),
                env=launch_environ(os.environ, {}, 1),
                start_new_session=True,  # a signal to the worker's process group must not kill the guard: it tidies up
            )
        finally:
            os.close(reply_write)
        if self._read_reply() is None:
            raise RuntimeError(f"the guard of {self._directory} has ended with code {self._guard.wait()}")
        return own_host(os.environ), str(self._directory)

    def launch(
        self, shares: list[RankShare], env: dict[str, str], cpus_per_rank: float, role: str = "rank"
    ) -> tuple[int, str]:
        """Start the ranks and wait for the launcher's end; its exit code and the tail of its standard error."""
        assert self._guard is not None and self._guard.stdin is not None
        try:
            site = probe_mpi_site(os.environ, env)
        except LaunchError as error:
            return 127, str(error)
        environ = launch_environ(os.environ, env, cpus_per_rank)
        if site.srun:
            path = self._directory / _HOSTFILE
            write_private_file(str(path), hostfile(shares).encode())
            environ["SLURM_HOSTFILE"] = str(path)
        self._guard.stdin.write(json.dumps({"line": compose(shares, site, role), "environ": environ}).encode() + b"\n")
        self._guard.stdin.flush()
        reply = self._read_reply()
        return (137, "the job was ended") if reply is None else (reply["code"], reply["tail"])

    def collect(self) -> dict[int, tuple[Any, ...]]:
        """The results of the ranks on this node, by rank."""
        return {int(path.stem[1:]): read_pickle(path) for path in self._directory.glob("r*.pkl")}

    def close(self) -> None:
        """End the guard, and with it the ranks, and remove the directory."""
        guard = self._guard
        if guard is None or guard.stdin is None:
            return
        guard.stdin.close()
        try:
            guard.wait(_GUARD_EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            guard.kill()

    def _read_reply(self) -> dict[str, Any] | None:
        """The guard's next line; None when it has ended."""
        line = self._replies.readline()
        return json.loads(line) if line.endswith(b"\n") else None


# ------------------------------------------------------------ adoption
# Processes that run already as the ranks of an MPI job: `PlaceHolder`, `adopt`, `leave`.
#
# A launcher starts a process for each rank, which holds the rank's place: it writes the variables by which the
# launcher's server knows the rank to a file that only this user can read, and waits. A process on the same host that
# takes these variables is the rank, as soon as it starts MPI.

_POLL = 0.01  # seconds


class PlaceHolder:
    """Holds the places of the ranks of one host, in a process there, whose death ends them. One holder `launch`es."""

    def __init__(self) -> None:
        self._holder = RankHolder()
        self._held: IO[bytes] | None = None
        self._failure = ""

    def prepare(self, token: str) -> str:
        """Make this host ready; the directory of its places. Args: token: names the job."""
        _, directory = self._holder.prepare(token)
        self._held = os.fdopen(open_private_file(os.path.join(directory, HELD), os.O_WRONLY | os.O_CREAT), "wb")
        fcntl.flock(self._held, fcntl.LOCK_EX)
        return directory

    def launch(self, shares: Sequence[RankShare]) -> None:
        """Start the processes that hold the places, and return at once."""
        threading.Thread(target=self._launch, args=(list(shares),), name="hpcray-mpi-launch", daemon=True).start()

    def _launch(self, shares: list[RankShare]) -> None:
        code, tail = self._holder.launch(shares, {}, 1, "place")
        self._failure = f"the launcher ended with code {code}: {tail.strip()}"

    @property
    def failure(self) -> str:
        """The way the launcher ended; "" while it runs."""
        return self._failure

    def close(self) -> None:
        """Let the places go, and remove their directory."""
        if self._held is not None:
            self._held.close()
        self._holder.close()


def adopt(directory: str, rank: int, size: int, timeout: float, holder: PlaceHolder | None = None) -> None:
    """Make this process a rank, and start MPI in it; MPI's COMM_WORLD has these ranks.

    Args:
        directory: of the places of this host.
        rank: which one.
        size: number of ranks.
        timeout: seconds until the place must be there.
        holder: of this host, in this process, if it launches the job.

    Raises:
        StartupError: MPI runs in this process already, the launcher has failed, or it was too slow.
    """
    if "mpi4py.MPI" in sys.modules and sys.modules["mpi4py.MPI"].Is_initialized():
        raise StartupError("MPI has been started in this worker already; hint: import mpi4py in the training function")
    deadline = time.monotonic() + timeout
    while True:
        try:
            place: dict[str, Any] = read_pickle(place_file(Path(directory), rank))
            break
        except FileNotFoundError:
            if holder is not None and holder.failure:
                raise StartupError(f"MPI rank {rank} of {size}: {holder.failure}") from None
            if time.monotonic() > deadline:
                raise StartupError(f"MPI rank {rank} of {size} was not started within {timeout:g} s") from None
            time.sleep(_POLL)
    os.environ.update(place["environ"])
    set_mpi_variables(os.environ, under_srun=place["srun"])
    try:
        found = start_mpi(place["one_host"], Path(directory)).COMM_WORLD.Get_size()
    finally:
        strip_launcher_variables(os.environ)  # this rank's alone: not for what it starts
    if found != size:
        raise StartupError(
            f"this MPI rank sees a world of {found} ranks and not {size}; hint: mpi4py belongs to another MPI than the "
            "launcher, see `hpcray doctor`"
        )


def leave() -> None:
    """End MPI in this process; all ranks do so together."""
    module: Any = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized() and not module.Is_finalized():
        module.Finalize()
