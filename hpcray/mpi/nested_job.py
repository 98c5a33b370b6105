"""A nested MPI job on reserved nodes: the actors that hold its CPUs, and the launcher's line."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcray.jobs import CALL, PickledCall, read_pickle, write_pickle
from hpcray.launch.launch_line import LaunchError, find_mpirun, forwarded_options, has_mpich, protocol
from hpcray.launch.launchers import OPEN_MPI
from hpcray.launch.local_ranks import compose_local
from hpcray.mpi import processes
from hpcray.platform.config_files import launch_config
from hpcray.platform.launcher_environment import strip_launcher_variables
from hpcray.platform.mpi_directory import find_library
from hpcray.platform.private_files import CLOSED, make_private_directory, write_private_file
from hpcray.platform.python_lines import module_line
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
        self._directory = Path(current.process.session_dir) / f"mpi-{token}"
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
