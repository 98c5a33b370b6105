"""Jobs on the Slurm test cluster (slurm/testcluster), and what they left on its hosts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.jobs import ROOT, Ended, Job
from helpers.leaks import PATIENCE

sys.path.insert(0, str(ROOT / "slurm"))

from testcluster.cluster import Cluster
from testcluster.conf import LOGIN

SRUN = ("srun", "--mpi=pmix", "--ntasks-per-node=1")
_DAEMONS = frozenset({"munged", "slurmctld", "slurmscriptd", "slurmd", "slurmdbd", "mariadbd"})
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")
_PATIENCE = 90.0
_PAUSE = 0.25
"""Between two questions to Slurm, which take the processors from the jobs that are waited for."""


def boot(
    nodes: int = 4, name: str = "test", binding: bool = False, topology: str = "", accounting: bool = False
) -> Cluster:
    """A cluster for this test run, that ends with it. Its hosts see the checkout and the virtual environment under
    paths that every user may walk, wherever they lie."""
    name = f"{name}-{os.getpid()}"
    top = f"/run/hpcray-testcluster/{name}"
    shared = [(str(ROOT), f"{top}/hpcray"), (sys.prefix, f"{top}/venv")]
    if not any(place.startswith(sys.prefix + "/") or sys.prefix == place for place in (str(ROOT), sys.base_prefix)):
        shared.append((sys.prefix, sys.prefix))  # where scripts of the environment look for its interpreter
    if libraries := os.environ.get("HPCRAY_RAY_LIBRARIES"):
        shared.append((os.path.realpath(libraries), f"{top}/ray"))
    if sys.base_prefix != "/usr":  # the environment's interpreter is a link to it
        shared.append((sys.base_prefix, sys.base_prefix))
    return Cluster.up(
        name, nodes, shared=shared, accounting=accounting, binding=binding, owner=os.getpid(), topology=topology
    )


class Started(Job):
    """A command that runs on a host of the cluster. A context manager: what still runs at the end is killed."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(environ),
            start_new_session=True,
        )


class Slurm:
    """What a test uses of the cluster.

    Attributes:
        cluster: the cluster itself.
        place: a directory that every host sees and every user may write to; jobs start in it.
        source: the checkout, as the hosts see it.
        python: the interpreter, as the hosts see it.
    """

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.place = cluster.directory / "shared" / name
        self.place.mkdir()
        self.place.chmod(0o1777)
        self.source = cluster.directory / "hpcray"
        self.python = str(cluster.directory / "venv" / "bin" / Path(sys.executable).name)

    def environ(self, user: str = "root") -> dict[str, str]:
        """What a user's shell has: the environment activated, the programs of the checkout on PATH, nothing of MPI."""
        path = f"{self.source}/launch:{os.path.dirname(self.python)}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        base = {"PATH": path, "PYTHONPATH": str(self.source), "LANG": "C.UTF-8", "HOME": "/root", "USER": "root"}
        return self.cluster.environment({**base, "PYTHON": self.python, "PYTHONUNBUFFERED": "1"}, user)

    def start(
        self, *command: object, host: str = LOGIN, user: str = "root", environ: Mapping[str, str] | None = None
    ) -> Started:
        """Start a command on a host, as a user, with `environ` for everything that differs from `self.environ()`."""
        line = self.cluster.command(host, [str(part) for part in command], user, str(self.place))
        return Started(line, {**self.environ(user), **(environ or {})})

    def run(
        self,
        *command: object,
        host: str = LOGIN,
        user: str = "root",
        environ: Mapping[str, str] | None = None,
        timeout: float = _PATIENCE,
    ) -> Ended:
        """Run a command on a host to its end."""
        with self.start(*command, host=host, user=user, environ=environ) as started:
            return started.wait(timeout)

    def said(self, *command: object, host: str = LOGIN) -> str:
        """What a command says that has to succeed."""
        ended = self.run(*command, host=host)
        assert ended.code == 0, f"{command}: {ended.code}\n{ended.out}\n{ended.err}"
        return ended.out.strip()

    def write(self, text: str, name: str = "program.py") -> Path:
        """A file that every host sees and every user may read."""
        path = self.place / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    # ------------------------------------------------------------ batch jobs

    def sbatch(self, *arguments: object, user: str = "root", environ: Mapping[str, str] | None = None) -> str:
        """Submit a batch job; returns its id."""
        ended = self.run("sbatch", "--parsable", *arguments, user=user, environ=environ)
        assert ended.code == 0, ended.err
        return ended.out.strip()

    def job(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job: `JobState`, `ExitCode`, …"""
        said = self.said("scontrol", "show", "job", "-o", job).splitlines()[-1]
        return dict(part.split("=", 1) for part in said.split() if "=" in part)

    def wait(self, condition: Callable[[], object], what: str, timeout: float = _PATIENCE) -> None:
        """Poll until the condition holds; a failure shows the queue and what the test's batch jobs wrote."""
        deadline = time.monotonic() + timeout
        while not condition():
            late = time.monotonic() > deadline
            assert not late, f"waited {timeout:g} s for: {what}\n{self.run('squeue').out}{self.output()}"
            time.sleep(_PAUSE)

    def wait_state(self, job: str, *states: str, timeout: float = _PATIENCE) -> dict[str, str]:
        """Wait until the job is in one of these states, or over; fail when it is in another one then."""
        self.wait(lambda: self.job(job)["JobState"] in (*states, *_OVER), f"job {job} {' or '.join(states)}", timeout)
        facts = self.job(job)
        assert facts["JobState"] in states, f"{facts}\n{self.output()}"
        return facts

    def finish(self, job: str, timeout: float = _PATIENCE) -> dict[str, str]:
        """Wait until the job is over; returns what Slurm knows then."""
        return self.wait_state(job, *_OVER, timeout=timeout)

    def complete(self, job: str, timeout: float = _PATIENCE) -> str:
        """Wait until the job is over; fail unless it has ended well. Returns `output`."""
        facts = self.finish(job, timeout)
        shown = self.output()
        assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), f"{facts}\n{shown}"
        return shown

    def wait_output(self, job: str, text: str, timeout: float = _PATIENCE) -> None:
        """Wait until a batch job has written `text`; fail when it ends before."""
        self.wait(
            lambda: text in self.output() or self.job(job)["JobState"] in _OVER, f"{text!r} of job {job}", timeout
        )
        assert text in self.output(), f"{self.job(job)}\n{self.output()}"

    def output(self) -> str:
        """Everything that batch jobs of this test wrote to their output files."""
        found = sorted(self.place.glob("*.out"))
        return "".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in found)

    def tmp(self, host: str) -> Path:
        """/tmp of a host, seen from outside."""
        return Path(f"/proc/{self.cluster.pid_of(host)}/root/tmp")

    # ------------------------------------------------------------ leaks

    def processes(self, name: str = "") -> dict[str, list[int]]:
        """Pids, as seen from outside, on each host: all besides the daemons, or those with this command name."""
        firsts = {self.cluster.pid_of(host): host for host in self._up()}
        spaces = {self._namespace(pid): host for pid, host in firsts.items()}
        found: dict[str, list[int]] = {}
        for pid in [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]:
            with contextlib.suppress(OSError):
                host = spaces.get(self._namespace(pid))
                comm = Path(f"/proc/{pid}/comm").read_text().strip()
                if host and comm not in _DAEMONS and pid not in firsts and name in ("", comm):
                    found.setdefault(host, []).append(pid)
        return found

    def kill(self, host: str) -> None:
        """End everything that jobs have on a host at once; Slurm's own processes live. Nobody is left to tidy up."""
        for pid in self.processes().get(host, []):
            with contextlib.suppress(OSError):
                if not Path(f"/proc/{pid}/comm").read_text().startswith("slurm"):
                    os.kill(pid, signal.SIGKILL)
        subprocess.run(["rm", "-rf", *map(str, self._files(host))], check=False)

    def left(self) -> dict[str, Any]:
        """What is there besides the daemons: processes and files of each host, jobs and steps of Slurm."""
        found: dict[str, Any] = {}
        for host, pids in self.processes().items():
            found[host] = [told for pid in pids if (told := _describe(pid))]
        for host in self._up():
            found.setdefault(host, []).extend(path for top in self._files(host) for path in _tree(top))
        found["jobs"] = self.said("squeue", "-h").splitlines()
        found["steps"] = self.said("squeue", "-h", "-s").splitlines()
        return {where: what for where, what in found.items() if what}

    def check(self, patience: float = PATIENCE) -> None:
        """Fail unless everything is gone within `patience` seconds."""
        deadline = time.monotonic() + patience
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        assert not left, f"still there after {patience:g} s: {left}"

    def clean(self) -> None:
        """End what a failed test left."""
        for job in self.said("squeue", "-h", "-o", "%A").split():
            self.run("scancel", "--full", "--signal=KILL", job)
            self.run("scancel", job)
        for pid in [pid for pids in self.processes().values() for pid in pids]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for host in self._up():
            subprocess.run(["rm", "-rf", *map(str, self._files(host))], check=False)
        self.cluster.boot(*set(self.cluster.plan.hosts).difference(self._up()))
        self.cluster.wait_idle()

    def _files(self, host: str) -> list[Path]:
        """What is in /tmp and /dev/shm of a host, besides shared directories."""
        root = Path(f"/proc/{self.cluster.pid_of(host)}/root")
        shared = [target for _, target in self.cluster.plan.shared]
        found = [*(root / "tmp").iterdir(), *(root / "dev" / "shm").iterdir()]
        return [path for path in found if not any(target.startswith(f"/tmp/{path.name}") for target in shared)]

    def _up(self) -> list[str]:
        return [host for host in self.cluster.plan.hosts if self.cluster.is_up(host)]

    @staticmethod
    def _namespace(pid: int) -> str:
        return os.readlink(f"/proc/{pid}/ns/pid")


def _tree(top: Path) -> list[str]:
    """The path and all below it. What is removed meanwhile is left out (`Path.rglob` raises then)."""
    return [str(top), *(os.path.join(place, name) for place, dirs, files in os.walk(top) for name in (*dirs, *files))]


def _describe(pid: int) -> str:
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"{pid} {Path(f'/proc/{pid}/comm').read_text().strip()}: {line[:200]}"
    return ""


@contextlib.contextmanager
def leak_checked(cluster: Cluster, name: str) -> Iterator[Slurm]:
    """The cluster for one test; fail after a test that passed if anything is left on a host."""
    slurm = Slurm(cluster, name)
    try:
        yield slurm
        slurm.check()
    finally:
        if slurm.left() or not all(map(cluster.is_up, cluster.plan.hosts)):
            slurm.clean()
