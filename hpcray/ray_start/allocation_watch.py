"""How a keeper sees the end of its allocation, which kills nothing where processes detach from their step; and what
cleans up where their step's end kills them.

While Slurm's own processes of the job run on this host, the job does; the kernel reports their end. Where there are
none, as between two steps, the batch system is asked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpcray.platform.allocation import run_command
from hpcray.platform.launcher_environment import outside_of_job
from hpcray.platform.private_files import CLOSED, PrivateDirectory, is_trusted_owner, open_private_file
from hpcray.platform.process_control import code_line, set_process_name
from hpcray.platform.process_tree import ProcessIdentity, children_by_name

_FIRST_QUESTIONS = (0.5, 1.0, 2.0, 4.0)
_INTERVAL = 10.0
"""Seconds between questions to the batch system; soon after the last of Slurm's processes has ended more often."""
_TIMEOUT = 20.0
_QUERIES: dict[str, list[str]] = {
    "slurm": ["squeue", "--noheader", "--format=%T", "--jobs"],
    "pbs": ["qstat", "-f"],
    "flux": ["flux", "jobs", "--no-header", "--format={state}"],
    "lsf": ["bjobs", "-noheader", "-o", "stat"],
}
_ENDING = re.compile(
    r"^(COMPLETED|COMPLETING|CANCELLED|FAILED|TIMEOUT|NODE_FAIL|PREEMPTED|BOOT_FAIL|OUT_OF_MEMORY|DEADLINE|REVOKED"
    r"|CLEANUP|INACTIVE|DONE|EXIT|\s*job_state = [FE])\b",
    re.MULTILINE,
)


def allocation_is_over(code: int, text: str, error: str) -> bool:
    """Return True if a batch system's answer about a job says that it has ended. Without an answer it has not."""
    if code:
        return bool(re.search(r"invalid job id|unknown job|has finished|not found", error, re.IGNORECASE))
    return not text.strip() or bool(_ENDING.search(text))


class AllocationWatch:
    """Watches the allocation of a node.

    Args:
        allocation: as `allocation_of` names it.
        ask: runs a command, and returns its exit code, its output and its error output; None where it cannot be run.
    """

    def __init__(
        self, allocation: str, ask: Callable[[Sequence[str]], tuple[int, str, str] | None] | None = None
    ) -> None:
        self._kind, _, self._job = allocation.partition("-")
        self._ask = ask or _run
        self._steps: dict[int, int] = {}  # pidfds of Slurm's processes of the job, by pid
        self._asked = 0
        self._next = 0.0
        self._look()

    def fds(self) -> list[int]:
        """Descriptors that become readable when one of Slurm's processes has ended."""
        return list(self._steps.values())

    def wait(self, now: float) -> float:
        """Seconds until the batch system has to be asked; infinite while the kernel reports it."""
        if self._steps or self._kind not in _QUERIES:
            return float("inf")
        return max(0.0, self._next - now)

    def is_over(self, now: float) -> bool:
        """Return True when the allocation has ended. Call it when a descriptor is readable, or the time has come.

        Args:
            now: monotonic seconds.
        """
        before = bool(self._steps)
        self._look()
        if self._steps or self._kind not in _QUERIES:
            return False
        if before:
            self._asked, self._next = 0, now
        if now < self._next:
            return False
        early = self._asked < len(_FIRST_QUESTIONS)
        self._next = now + (_FIRST_QUESTIONS[self._asked] if early else _INTERVAL)
        self._asked += 1
        answer = self._ask([*_QUERIES[self._kind], self._job])
        return answer is not None and allocation_is_over(*answer)

    def close(self) -> None:
        """Close the descriptors."""
        for fd in self._steps.values():
            os.close(fd)
        self._steps.clear()

    def _look(self) -> None:
        """Find Slurm's processes of this job on this host."""
        if self._kind != "slurm":
            return
        found = set(step_daemons(self._job))
        for pid in self._steps.keys() - found:
            os.close(self._steps.pop(pid))
        for pid in found - self._steps.keys():
            with contextlib.suppress(OSError):
                self._steps[pid] = os.pidfd_open(pid)


def step_daemons(job: str, proc: str = "/proc") -> list[int]:
    """Pids of the slurmstepd processes of a job on this host: `slurmstepd: [17.batch]`. They are root's, or this user's
    in a cluster of one's own; any other user may give a process that name."""
    wanted = re.compile(rb"slurmstepd: \[%s\." % re.escape(job.encode()))
    found = []
    for name in os.listdir(proc):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if (
                    Path(proc, name, "comm").read_bytes().startswith(b"slurmstepd")
                    and wanted.match(Path(proc, name, "cmdline").read_bytes())
                    and is_trusted_owner(os.stat(os.path.join(proc, name)).st_uid)
                ):
                    found.append(int(name))
    return found


def _run(command: Sequence[str]) -> tuple[int, str, str] | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = run_command(command, _TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.returncode, done.stdout, done.stderr


# ------------------------------------------------------------ guard
# With cgroups, Slurm kills all that a step leaves at its end, and all of the batch script at its own: no process of the
# node is left to remove its sockets and its files. So a step of its own on the same host, whose one process waits for
# the node's end, removes them. Slurm ends that step with the job, in order. An `srun` that the step's end kills would
# take the guard with it, by the second process that it has for this: so the guard ends both, once it has begun.

_RUN = (
    "from importlib.util import find_spec, module_from_spec; "
    "sys.modules.setdefault('hpcray', module_from_spec(find_spec('hpcray'))); "
    f"from {__name__} import guard; guard(*sys.argv[1:])"
)
"""Code of the guard. It waits for hours, mostly, without the imports of `import hpcray`, which are for programs."""
_BEGIN_WITHIN = 20
_BEGUN = 3.0
"""Seconds that `ray start` waits for that: it takes a third of one, and more on a busy host."""
SWEEP, SWEEP_CHECK = 10.0, 0.1
"""Seconds in which the last processes of a node that was killed have to be gone, and between looks."""


class Guard:
    """The step that removes what is left when the node and its keeper are killed. Close it when the node has ended.

    Args:
        job: Slurm's id of the job.
        session_dir: of the node.
        cluster: path of the cluster's file if this is its head, "" else.
        environ: of the command, as the step had it.
    """

    def __init__(self, job: str, session_dir: str, cluster: str, environ: Mapping[str, str]) -> None:
        host = environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
        me = ProcessIdentity.of(os.getpid())
        assert me is not None
        line = ["srun", f"--jobid={job}", f"--nodelist={host}", "--overlap", "--nodes=1", "--ntasks=1", "--mpi=none"]
        line += [f"--immediate={_BEGIN_WITHIN}", "--job-name=hpcray-guard", "--chdir=/", "--export=ALL", "--quiet"]
        line += ["--input=none", "--output=none", "--error=none"]
        line += code_line(_RUN, session_dir, cluster, str(me.pid), str(me.started))
        null = subprocess.DEVNULL
        self._srun: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            self._srun = subprocess.Popen(
                line, env=outside_of_job(os.environ), stdin=null, stdout=null, stderr=null, start_new_session=True
            )
            threading.Thread(target=self._srun.wait, daemon=True).start()

    def await_begun(self) -> None:
        """Wait until it has begun, or cannot: the end of a step that is about to come would end its `srun` too."""
        if self._srun is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._srun.wait(_BEGUN)

    def close(self) -> None:
        """The node has ended, and its keeper has removed all of it: a step that has not begun need not."""
        if self._srun is not None:
            self._srun.terminate()


def guard(session_dir: str, cluster: str, keeper: str, started: str) -> None:
    """Be that process: wait for the end of a node, and remove what is left of it. Arguments: see `Guard`; pid of the
    keeper, and when it began, in clock ticks since boot."""
    set_process_name("hpcray-guard")
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # for the program
    if not os.path.isdir(session_dir):
        return  # it has ended already, or is in a container

    def held_by() -> int:
        """The pid of the keeper; 0 when it has ended."""
        found = ProcessIdentity.of(int(keeper))
        return found.pid if found is not None and found.started == int(started) else 0

    def end_node(number: int, frame: object) -> None:
        """The job ends. Slurm waits for this step, and so the keeper need not see it by itself."""
        if pid := held_by():
            os.kill(pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end_node)
    _end_srun(held_by())
    _await_unlocked(session_dir)
    from hpcray.platform.session_directory import remove_dead_sessions  # not while it waits
    from hpcray.ray_start.session_files import sweep_files

    environ = {**os.environ, "HPCRAY_TMPDIR": os.path.dirname(os.path.dirname(session_dir))}
    while True:
        remove_dead_sessions(environ)
        try:  # another user may have the name, where a cleaner had removed the directory above
            PrivateDirectory.open(session_dir, False, CLOSED).close()
        except OSError:
            break
        time.sleep(SWEEP_CHECK)
        _await_unlocked(session_dir)  # it lives: a cleaner had removed its files, and it has made them again
    deadline = time.monotonic() + SWEEP
    while held_by() and time.monotonic() < deadline:
        time.sleep(SWEEP_CHECK)
    sweep_files(os.environ)
    if cluster:
        with contextlib.suppress(OSError):
            os.unlink(cluster)  # a secret of nothing


def _end_srun(keeper: int) -> None:
    """End the `srun` of this step, its second process first."""
    for pid, name in (children_by_name(keeper) if keeper else {}).items():
        if name == "srun":
            for each in (*children_by_name(pid), pid):
                with contextlib.suppress(OSError):
                    os.kill(each, signal.SIGKILL)


def _await_unlocked(session_dir: str) -> None:
    """Wait until no process holds the lock of a session directory."""
    with contextlib.suppress(OSError):
        lock = open_private_file(os.path.join(session_dir, "lock"), os.O_RDWR, CLOSED)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        finally:
            os.close(lock)
