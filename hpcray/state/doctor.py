"""What `hpcray doctor` finds out: on this machine, and in an allocation on every node of it, without starting a job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from hpcray.base.config import Config
from hpcray.host.allocation import Allocation, ask_end_time
from hpcray.host.allocation_nodes import compress_nodes
from hpcray.state.doctor_host import look_at_host, look_at_software
from hpcray.state.doctor_wires import find_launchers, look_at_mpi, look_at_start, look_at_ucx, probe_wires
from hpcray.state.findings import FAIL, NOTE, OK, WARN, Finding

_LITTLE_TIME = 600.0
_SKEW = 1.0
_LARGE_SKEW = 60.0


def examine(
    require_rdma: bool = False, start: bool = True, tell: Callable[[str], None] = lambda what: None
) -> list[Finding]:
    """All findings of this machine, in the order of the report.

    Args:
        require_rdma: its absence is a failure.
        start: in a task of srun, whether to judge srun's start-up protocol.
        tell: called before each look with what is looked at. Programs that are run for one get 40 s at most together;
            a file system that hangs may hold it for ever.
    """
    environ = dict(os.environ)
    tell("reading the versions")
    found = look_at_software()
    found += [Finding("software", "variable", text, WARN) for text in Config.unknown_variables(environ)]
    tell("loading MPI and UCX")
    wires = probe_wires()
    tell("asking mpirun and srun")
    found += look_at_mpi(wires, find_launchers())
    found += look_at_start(wires, environ) if start else []
    tell("looking at the network")
    found += look_at_ucx(wires, require_rdma)
    tell("looking at CPUs, memory, GPUs and directories")
    return found + look_at_host(environ)


def examine_job(given: Allocation, mpi: str, problem: str, environ: Mapping[str, str]) -> list[Finding]:
    """What the job as a whole is, seen from where the doctor runs. Asks Slurm's controller once, for the time left.

    Args:
        given: the allocation.
        mpi: srun's start-up protocol for our MPI library.
        problem: why srun cannot use it, "" if it can.
        environ: the environment.
    """
    count = len(given.nodes)
    text = f"job {given.job}, {count} node{'s' * (count != 1)}: {compress_nodes(given.nodes)}"
    found = [Finding("Slurm", "allocation", text, OK)]
    if given.het:
        parts = " + ".join(f"{len(group.nodes)} ({group.job})" for group in given.het)
        found.append(Finding("Slurm", "heterogeneous", f"parts of {parts} nodes", NOTE))
    if given.restarts:
        found.append(Finding("Slurm", "requeued", f"{given.restarts} times"))
    found.append(_start(mpi, problem))
    found.append(_time_left(ask_end_time(environ)))
    if count > 1:
        # Neither the environment nor scontrol tells it.
        value = "the job ends with the first one, unless it was submitted with --no-kill"
        found.append(
            Finding("Slurm", "loss of a node", value, NOTE, "#SBATCH --no-kill; hpcray-launch adds srun's part")
        )
    return found


def _start(mpi: str, problem: str) -> Finding:
    if not problem:
        return Finding("Slurm", f"srun --mpi={mpi}", "works", OK)
    hint = "ask the site for it; until then hpcray-launch uses mpirun, which ends the job when a node is lost"
    return Finding("Slurm", f"srun --mpi={mpi}", problem, FAIL, hint)


def _time_left(end: float | None) -> Finding:
    if end is None:
        return Finding("Slurm", "time left", "no limit, or not told")
    left = end - time.time()
    little = left < _LITTLE_TIME
    minutes = max(0, int(left)) // 60
    shown = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
    return Finding(
        "Slurm",
        "time left",
        shown,
        WARN if little else OK,
        "the job ends soon: work that takes longer is lost without a checkpoint" if little else "",
    )


def judge_clocks(offsets: Mapping[str, tuple[float, float]]) -> Finding:
    """How far the nodes' clocks lie apart.

    Args:
        offsets: by node, how much its clock is ahead of ours, and how uncertain that is, both in seconds.
    """
    if len(offsets) < 2:
        return Finding("clocks", "skew", "measured on several nodes only")
    ahead = max(offsets, key=lambda node: offsets[node][0])
    behind = min(offsets, key=lambda node: offsets[node][0])
    unsure = offsets[ahead][1] + offsets[behind][1]
    skew = max(0.0, offsets[ahead][0] - offsets[behind][0] - unsure)
    value = f"{skew:.3f} s at least, give or take {unsure:.3f} s"
    if skew < _SKEW:
        return Finding("clocks", "skew", f"less than {max(0.01, skew + 2 * unsure):.2f} s", OK)
    level = FAIL if skew >= _LARGE_SKEW else WARN
    return Finding(
        "clocks",
        "skew",
        f"{ahead} is ahead of {behind}: {value}",
        level,
        "the nodes need NTP: times in logs, time limits and make-like tools go wrong",
    )
