"""A nested MPI job on reserved nodes: what runs in the workers that hold the CPUs, and the launcher's line."""

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

from hpcray.cluster import mpi_rank
from hpcray.cluster.launch import _FORWARD_NAMES, _FORWARD_PREFIXES, find_mpirun
from hpcray.cluster.mpi_rank import CALL, spec_of
from hpcray.cluster.outcome import Call, write_pickle
from hpcray.cluster.srun import LaunchError, has_mpich, protocol
from hpcray.host.launcher import strip_launcher
from hpcray.runtime.refs import current

_END_LIMIT = 20.0
_HOSTFILE = "hosts"
# srun takes options from the variables of the step that we are in; all that it needs are the job and the cluster.
_OF_THE_JOB = frozenset({"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TMPDIR"})


@dataclass(frozen=True)
class Share:
    """What one node gives to the job: `ranks` ranks, the first of which is number `first`, with their files in
    `directory` on `host`."""

    host: str
    directory: str
    first: int
    ranks: int


@dataclass(frozen=True)
class MpiSite:
    """What the line depends on besides the shares.

    Attributes:
        python: the interpreter of the ranks.
        environ: the environment of the worker that starts the job.
        host: its host.
        root: whether we are root.
        mpirun: absolute path; "" where srun starts the ranks.
        srun: srun's start-up protocol; "" where mpirun starts the ranks.
        export: variables that ranks on other hosts must have, too.
    """

    python: str
    environ: Mapping[str, str]
    host: str
    root: bool = False
    mpirun: str = ""
    srun: str = ""
    export: Sequence[str] = field(default_factory=tuple)


def compose(shares: Sequence[Share], site: MpiSite) -> list[str]:
    """The launcher's line. Pure."""
    hosts = list(dict.fromkeys(share.host for share in shares))
    parts = [(share.directory, share.first, share.ranks) for share in shares]
    command = [site.python, "-m", mpi_rank.__name__, spec_of(parts, bool(site.srun), len(hosts) == 1)]
    ranks = str(sum(share.ranks for share in shares))
    if site.srun:
        # Each rank where hpcray has reserved its CPUs, beside the step that hpcray itself is; one that fails ends all.
        line = ["srun", f"--mpi={site.srun}", "--overlap", "-N", str(len(hosts)), "-n", ranks, "--overcommit"]
        line += ["--distribution=arbitrary", "--kill-on-bad-exit=1", "--export=ALL"]
        # The CPUs are hpcray's to share out. A Slurm that does not bind its tasks would complain each time.
        if "SLURM_CPU_BIND" in site.environ or "SLURM_STEP_ID" not in site.environ:
            line.append("--cpu-bind=none")
        return [*line, *command]
    line = [site.mpirun, *(["--allow-run-as-root"] if site.root else [])]
    if hosts == [site.host]:
        line += ["--host", "localhost", "-n", ranks, "--map-by", "node:OVERSUBSCRIBE"]
        # Its session directory, too, goes with the job.
        line += ["--prtemca", "prte_tmpdir_base", shares[0].directory]
    else:
        slots = {host: sum(share.ranks for share in shares if share.host == host) for host in hosts}
        line += ["--host", ",".join(f"{host}:{count}" for host, count in slots.items()), "-n", ranks]
        line += ["--map-by", "slot:OVERSUBSCRIBE"]
        for name in _forwarded(site):
            line += ["-x", name]
    return [*line, "--bind-to", "none", *command]


def _forwarded(site: MpiSite) -> list[str]:
    ours = {name for name in site.environ if name.startswith(_FORWARD_PREFIXES) or name in _FORWARD_NAMES}
    return sorted((ours | set(site.export)) - {"HPCRAY_CONSOLE"})


def hostfile(shares: Sequence[Share]) -> str:
    """One line per rank, as srun's arbitrary distribution wants it."""
    return "".join(f"{share.host}\n" * share.ranks for share in shares)


def launch_environ(environ: Mapping[str, str], env: Mapping[str, str], cpus_per_rank: float) -> dict[str, str]:
    """The launcher's environment: this worker's, without what the outer job's launcher has left."""
    found = {name: value for name, value in environ.items() if not name.startswith(("SLURM_", "SRUN_"))}
    found |= {name: environ[name] for name in _OF_THE_JOB if name in environ}
    strip_launcher(found)
    found.pop("HPCRAY_CONSOLE", None)
    found["OMP_NUM_THREADS"] = str(max(1, int(cpus_per_rank)))
    return {**found, **env}


def look_around(environ: Mapping[str, str], env: Mapping[str, str]) -> MpiSite:
    """This worker's site.

    Raises:
        LaunchError: there is no mpirun.
    """
    by_srun = bool(environ.get("SLURM_JOB_ID")) and shutil.which("srun") is not None
    return MpiSite(
        python=sys.executable,
        environ=environ,
        host=own_host(environ),
        root=os.geteuid() == 0,
        mpirun="" if by_srun else find_mpirun("", os.path.dirname(sys.executable)),
        srun=protocol(environ, has_mpich()) if by_srun else "",
        export=tuple(env),
    )


def own_host(environ: Mapping[str, str]) -> str:
    """How the launcher knows this host."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


class Holder:
    """Holds the CPUs of some ranks of a job on one node; an actor, whose death ends them.

    `prepare` first; then, on one of the job's holders, `launch`; then `collect`; `close` at any time.
    """

    def __init__(self) -> None:
        self._directory = Path()
        self._guard: subprocess.Popen[bytes] | None = None
        self._reply = -1

    def prepare(self, token: str, call: bytes) -> tuple[str, str]:
        """Make this node ready; its host and directory.

        Args:
            token: names the job.
            call: a pickled `Call`.
        """
        assert current.process is not None
        self._directory = Path(current.process.session_dir) / f"mpi-{token}"
        self._directory.mkdir(0o700)
        loaded: Call = pickle.loads(call)
        write_pickle(self._directory / CALL, loaded)
        self._reply, told = os.pipe()
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "hpcray.cluster.mpi_guard", str(self._directory), str(told)],
                stdin=subprocess.PIPE,
                pass_fds=(told,),
                env=self._environ({}, 1),
                start_new_session=True,  # what kills this worker does not kill it: it has to tidy up
            )
        finally:
            os.close(told)
        if self._read_reply() is None:
            raise RuntimeError(f"the guard of {self._directory} has ended with code {self._guard.wait()}")
        return own_host(os.environ), str(self._directory)

    def launch(self, shares: list[Share], env: dict[str, str], cpus_per_rank: float) -> tuple[int, str]:
        """Start the ranks and wait for the launcher's end; its exit code and its last words."""
        assert self._guard is not None and self._guard.stdin is not None
        try:
            site = look_around(os.environ, env)
        except LaunchError as error:
            return 127, str(error)
        environ = self._environ(env, cpus_per_rank)
        if site.srun:
            path = self._directory / _HOSTFILE
            path.write_text(hostfile(shares))
            environ["SLURM_HOSTFILE"] = str(path)
        self._guard.stdin.write(json.dumps({"line": compose(shares, site), "environ": environ}).encode() + b"\n")
        self._guard.stdin.flush()
        reply = self._read_reply()
        return (137, "the job was ended") if reply is None else (reply["code"], reply["tail"])

    def collect(self) -> dict[int, tuple[Any, ...]]:
        """What the ranks on this node have made, by rank."""
        found = {}
        for path in self._directory.glob("r*.pkl"):
            found[int(path.stem[1:])] = pickle.loads(path.read_bytes())
        return found

    def close(self) -> None:
        """End what runs and remove the directory."""
        guard = self._guard
        if guard is None or guard.stdin is None:
            return
        guard.stdin.close()
        try:
            guard.wait(_END_LIMIT)
        except subprocess.TimeoutExpired:
            guard.kill()

    def _environ(self, env: Mapping[str, str], cpus_per_rank: float) -> dict[str, str]:
        return launch_environ(os.environ, env, cpus_per_rank)

    def _read_reply(self) -> dict[str, Any] | None:
        """The guard's next line; None when it has ended."""
        data = b""
        while not data.endswith(b"\n"):
            more = os.read(self._reply, 1 << 16)
            if not more:
                return None
            data += more
        found: dict[str, Any] = json.loads(data)
        return found
