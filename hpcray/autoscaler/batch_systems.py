"""Batch systems: the command lines that submit, query and cancel a job, and what their answers mean. Pure.

Each is a `BatchSystem`. Slurm's further abilities (arrays, requeue, accounting) are used where they are needed:
`jobs/batch_queues.py`, `jobs/submission.py`, `autoscaler/node_provider.py`. PBS and Flux were tried with programs that
imitate them, not with the real ones: docs/how-to/site.md.

Source: OpenPBS 23.06, qsub(1B), qstat(1B), qdel(1B); Flux 0.66, flux-batch(1), flux-jobs(1), flux-cancel(1).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from hpcray.platform.process_control import module_line
from hpcray.runtime.node.join_token import NODE_TYPE
from hpcray.runtime.node.options import INSTANCE

SLURM, PBS, FLUX = "slurm", "pbs", "flux"
_MB = 1 << 20
HELD_BY_USER = "JobHeldUser"
WILL_NOT_START = frozenset({
    "BadConstraints", "DependencyNeverSatisfied", "InvalidAccount", "InvalidQOS", "JobHeldAdmin", HELD_BY_USER,
    "PartitionNodeLimit", "PartitionTimeLimit", "QOSMaxNodePerJobLimit", "QOSMaxWallDurationPerJobLimit",
})  # fmt: skip
"""Reasons of Slurm for which a job waits until it is changed by hand, or released, or its partition is."""
_PBS_CONFIGURATION = "/etc/pbs.conf"
_PBS_NAME = re.compile(r"[^A-Za-z0-9_.+-]+")
_LONGEST_PBS_NAME = 200
_PBS_STATES = dict.fromkeys("QHWTM", "PENDING") | dict.fromkeys("REBSU", "RUNNING")
_PBS_FINISHED = ("F", "X", "C")
_PBS_WALLTIME, _PBS_CPUTIME, _PBS_TERMINATED = -29, -24, 256 + 15  # Exit_status of a job that PBS has ended
_FLUX_STATES = dict.fromkeys(("NEW", "DEPEND", "PRIORITY", "SCHED"), "PENDING")
_FLUX_STATES |= {"RUN": "RUNNING", "CLEANUP": "RUNNING", "CANCELED": "CANCELLED"}
_GONE = re.compile(r"unknown job ?id|has finished|inactive|unknown job|not found|no such job", re.IGNORECASE)


class BatchRequest(Struct, frozen=True):
    """One job for a batch system: one process on each of its nodes. None and "": the site's default.

    Attributes:
        name: of the job.
        nodes: number of nodes.
        cpus, gpus: of each node.
        mem: bytes of each node.
        time: limit in seconds.
        partition: Slurm's partition, the queue of PBS or Flux.
        account: of PBS too; Flux's bank.
        constraint: Slurm's features; in PBS further resources of each chunk, `model=rome:os=el9`; in Flux `--requires`.
        output: path of the file for what the script prints, errors included.
        options: further ones of the command that submits, without the dashes; True for one without a value.
    """

    name: str
    nodes: int = 1
    cpus: int | None = None
    gpus: int | None = None
    mem: int | None = None
    time: int | None = None
    partition: str = ""
    account: str = ""
    constraint: str = ""
    output: str = ""
    options: Mapping[str, str | bool] = {}


class BatchSystem(Protocol):
    """One kind of batch system."""

    name: str
    submit_command: str

    def submit_line(self, request: BatchRequest) -> list[str]:
        """The command that reads the batch script from its standard input, and prints the id of the job.

        Raises:
            ValueError: the batch system has no such option.
        """

    def job_id(self, output: str) -> str:
        """The id in what that command has printed; "" for none."""

    def query_line(self, job_ids: Sequence[str]) -> list[str]:
        """The command that prints the states of jobs. Its exit code says nothing: one of the jobs may be forgotten."""

    def states(self, output: str) -> dict[str, str]:
        """The states in what that command has printed, by id: PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT.
        Jobs that the batch system does not know are left out."""

    def cancel_line(self, job_ids: Sequence[str]) -> list[str]:
        """The command that ends jobs: SIGTERM first."""

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment of these commands."""


class SlurmBatchSystem:
    """Slurm: sbatch, squeue, scancel."""

    name = SLURM
    submit_command = "sbatch"

    def submit_line(self, request: BatchRequest) -> list[str]:
        options: dict[str, str | int | bool | None] = {
            "job-name": request.name,
            "nodes": request.nodes,
            "ntasks-per-node": 1,
            "partition": request.partition or None,
            "account": request.account or None,
            "constraint": request.constraint or None,
            "time": None if request.time is None else math.ceil(request.time / 60),
            "cpus-per-task": request.cpus,
            "gpus-per-node": request.gpus,
            "mem": None if request.mem is None else f"{math.ceil(request.mem / _MB)}M",
            "output": request.output or None,
            "no-requeue": True,
            **request.options,
        }
        return ["sbatch", "--parsable", *long_options(options)]

    def job_id(self, output: str) -> str:
        found = re.search(r"^(\d+)(?:;|\s*$)", output, re.MULTILINE)
        return found[1] if found else ""

    def query_line(self, job_ids: Sequence[str]) -> list[str]:
        return ["squeue", "--noheader", "--states=all", "--format=%i|%T", f"--jobs={','.join(job_ids)}"]

    def states(self, output: str) -> dict[str, str]:
        rows = [line.split("|") for line in output.splitlines() if line.count("|") == 1]
        running = dict.fromkeys(("COMPLETING", "SIGNALING", "STAGE_OUT", "SUSPENDED", "STOPPED"), "RUNNING")
        known = {**running, "CONFIGURING": "PENDING", "REQUEUED": "PENDING", "REQUEUE_HOLD": "PENDING"}
        return {job.strip(): known.get(word.strip(), word.strip()) for job, word in rows}

    def cancel_line(self, job_ids: Sequence[str]) -> list[str]:
        return ["scancel", *job_ids]

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        return dict(environ)


class PbsBatchSystem:
    """OpenPBS and PBS Professional: qsub, qstat, qdel. (Torque's qstat and `select` differ.)"""

    name = PBS
    submit_command = "qsub"

    def submit_line(self, request: BatchRequest) -> list[str]:
        chunk = [str(request.nodes)]
        chunk += [f"ncpus={request.cpus}"] if request.cpus is not None else []
        chunk += [f"ngpus={request.gpus}"] if request.gpus else []
        chunk += [f"mem={math.ceil(request.mem / _MB)}mb"] if request.mem is not None else []
        chunk += [request.constraint] if request.constraint else []
        # -V: as sbatch and Flux, which give a job the environment of its submission.
        line = ["qsub", "-V", "-S", "/bin/sh", "-N", _PBS_NAME.sub("_", request.name)[:_LONGEST_PBS_NAME], "-r", "n"]
        line += ["-l", f"select={':'.join(chunk)}", "-l", "place=scatter"]
        if request.time is not None:
            hours, rest = divmod(request.time, 3600)
            line += ["-l", f"walltime={hours:02}:{rest // 60:02}:{rest % 60:02}"]
        line += ["-q", request.partition] if request.partition else []
        line += ["-A", request.account] if request.account else []
        line += ["-j", "oe", "-o", request.output] if request.output else []
        for name, value in request.options.items():
            line += [f"-{name}"] if value is True else [f"-{name}", str(value)] if value is not False else []
        return line

    def job_id(self, output: str) -> str:
        found = re.search(r"^(\d+(?:\[\])?(?:\.\S+)?)\s*$", output, re.MULTILINE)
        return found[1] if found else ""

    def query_line(self, job_ids: Sequence[str]) -> list[str]:
        return ["qstat", "-x", "-f", *job_ids]  # -x: ended ones too, where the site keeps them

    def states(self, output: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for block in re.split(r"^Job Id: ", output, flags=re.MULTILINE)[1:]:
            job, _, rest = block.partition("\n")
            fields = dict(re.findall(r"^ {4}(\w+) = (.*)$", rest, re.MULTILINE))
            word, code = fields.get("job_state", ""), fields.get("Exit_status", "")
            if word in _PBS_FINISHED:
                found[job.strip()] = _pbs_end(int(code)) if re.fullmatch(r"-?\d+", code) else "CANCELLED"
            elif word in _PBS_STATES:
                found[job.strip()] = _PBS_STATES[word]
        return found

    def cancel_line(self, job_ids: Sequence[str]) -> list[str]:
        return ["qdel", *job_ids]

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        return dict(environ)


def _pbs_end(code: int) -> str:
    if code in (_PBS_WALLTIME, _PBS_CPUTIME):
        return "TIMEOUT"
    return {0: "COMPLETED", _PBS_TERMINATED: "CANCELLED"}.get(code, "FAILED")


class FluxBatchSystem:
    """Flux: `flux batch`, `flux jobs`, `flux cancel`. A job is a Flux instance of its own, one slot on each node."""

    name = FLUX
    submit_command = "flux"

    def submit_line(self, request: BatchRequest) -> list[str]:
        if request.mem is not None:
            raise ValueError("Flux does not schedule memory; hint: leave mem out")
        count = str(request.nodes)
        line = ["flux", "batch", f"--job-name={request.name}", "-N", count, "-n", count]
        # Without a number of cores each slot has the whole node.
        line += ["--exclusive"] if request.cpus is None else [f"--cores-per-slot={request.cpus}"]
        line += [f"--gpus-per-slot={request.gpus}"] if request.gpus and request.cpus is not None else []
        line += [f"--time-limit={request.time}s"] if request.time is not None else []
        line += [f"--queue={request.partition}"] if request.partition else []
        line += [f"--bank={request.account}"] if request.account else []
        line += [f"--requires={request.constraint}"] if request.constraint else []
        line += [f"--output={request.output}", f"--error={request.output}"] if request.output else []
        return [*line, *long_options(request.options)]

    def job_id(self, output: str) -> str:
        found = re.search(r"^([ƒf]\w+|\d+)\s*$", output, re.MULTILINE)
        return found[1].replace("ƒ", "f") if found else ""

    def query_line(self, job_ids: Sequence[str]) -> list[str]:
        return ["flux", "jobs", "--all", "--no-header", "--format={id} {status}", *job_ids]

    def states(self, output: str) -> dict[str, str]:
        rows = [line.split() for line in output.splitlines()]
        return {row[0].replace("ƒ", "f"): _FLUX_STATES.get(row[1], row[1]) for row in rows if len(row) == 2}

    def cancel_line(self, job_ids: Sequence[str]) -> list[str]:
        return ["flux", "cancel", *job_ids]

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        return {**environ, "FLUX_F58_FORCE_ASCII": "1"}  # ids begin with f, not with ƒ


BATCH_SYSTEMS: dict[str, BatchSystem] = {
    system.name: system for system in (SlurmBatchSystem(), PbsBatchSystem(), FluxBatchSystem())
}
"""By name."""


def long_options(options: Mapping[str, str | int | bool | None]) -> list[str]:
    """Options by their long names as words of a command line; None and False are left out."""
    return [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in options.items()
        if value is not None and value is not False
    ]


def is_forgotten(complaint: str) -> bool:
    """Return whether a batch system says that a job has ended or is unknown to it."""
    return bool(_GONE.search(complaint))


def has_pbs(environ: Mapping[str, str]) -> bool:
    """Return whether jobs can be submitted to PBS here: qsub is on PATH, and configured."""
    if shutil.which("qsub", path=environ.get("PATH")) is None:
        return False
    return bool(environ.get("PBS_JOBID")) or os.path.exists(environ.get("PBS_CONF_FILE") or _PBS_CONFIGURATION)


def has_flux(environ: Mapping[str, str]) -> bool:
    """Return whether this process is in a Flux instance, or the system runs one."""
    if shutil.which("flux", path=environ.get("PATH")) is None:
        return False
    return bool(environ.get("FLUX_URI")) or os.path.exists("/run/flux/local")


_CANCEL_TIMEOUT = 10.0
"""Seconds that a batch system has to cancel a job."""


def cancel_by_name(name: str, environ: Mapping[str, str]) -> None:
    """Cancel the batch jobs of this name, and wait until Slurm has heard of it."""
    _cancel(["scancel", f"--name={name}"], environ)


def cancel_by_id(kind: str, job_id: str, environ: Mapping[str, str]) -> None:
    """Cancel a batch job, and wait until the batch system has heard of it. One that has ended is no error."""
    system = BATCH_SYSTEMS[kind]
    _cancel(system.cancel_line([job_id]), system.environ(environ))


def cancel_jobs(name: str, jobs: Sequence[tuple[str, str]], environ: Mapping[str, str]) -> None:
    """Cancel the batch jobs of a name ("": of none), and those of (batch system, id)."""
    if name:
        cancel_by_name(name, environ)
    for kind, job_id in jobs:
        cancel_by_id(kind, job_id, environ)


def _cancel(command: Sequence[str], environ: Mapping[str, str]) -> None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_CANCEL_TIMEOUT,
            env=dict(environ),
        )


# ------------------------------------------------------------ nodes that join

_OWN_ID = 'export {}="${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}}}"'
_SINGLE = '[ -n "${0}" ] || export {0}="$SLURM_JOB_ID"'


def batch_script(
    options: Mapping[str, str | int | bool | None], token: str, command: list[str], node_type: str = ""
) -> str:
    """The batch script of nodes that join as one world; where that is a single node, its step needs no MPI.

    Args:
        options: of sbatch by their long names; None and False: left out.
        token: path of the job's join token.
        command: of a single node.
        node_type: where the autoscaler starts the nodes.
    """
    lines = [
        f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={value}"
        for name, value in options.items()
        if value is not None and value is not False
    ]
    if node_type:
        lines += [_OWN_ID.format(INSTANCE), _SINGLE.format(INSTANCE), f"export {NODE_TYPE}={shlex.quote(node_type)}"]
    step = ["srun", "--mpi=none", "--no-kill", "--kill-on-bad-exit=0", "-W", "0", "--ntasks-per-node=1"]
    cpus = options.get("cpus-per-task")
    step += [] if cpus is None else [f"--cpus-per-task={cpus}"]
    step += command
    if options.get("nodes") != 1:
        step = module_line("hpcray.cli.launch", "--join", token)
    return "\n".join(["#!/bin/sh", *lines, "exec " + shlex.join(step), ""])
