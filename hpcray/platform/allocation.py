"""The resources that the batch system and the launcher gave this process, read from the environment alone; and the
short forms in which these write nodes and numbers.

No node queries the controller, which a thousand nodes would overwhelm; only `ask_end_time` does, for one process of a
job.

Source: Slurm 22.05, srun(1) and sbatch(1), "OUTPUT ENVIRONMENT VARIABLES"; recorded environments in the tests.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from hpcray.common.rank_variables import FLUX, OPEN_MPI, read_other_rank, read_rank

_T = TypeVar("_T")
_MB = 1 << 20
_NO_END_TIME = (1 << 32) - 2  # seconds; Slurm writes "no limit" as one of the largest numbers of 32 bits
# Steps of Slurm's own, which hold none of the job's resources: batch script, salloc's shell, and so on.
_FIRST_SPECIAL_STEP = 0xFFFFFF00
_TIME_LEFT = re.compile(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)")


class HetGroup(Struct, frozen=True):
    """One part of a heterogeneous job (`#SBATCH hetjob`).

    Attributes:
        job: its own job id.
        nodes: names of its nodes.
    """

    job: str
    nodes: tuple[str, ...]


class Allocation(Struct, frozen=True):
    """The resources of this process. None or an empty name: the environment does not say.

    Attributes:
        kind: "slurm", "pbs", "flux", "mpirun" or "" (started by hand).
        job: the batch system's id of the job.
        step: Slurm's id of the step that this process runs in; "" in a batch script or salloc's shell.
        nodes: names of the nodes: of the step if in one, else of the job.
        node: index of this host among `nodes`.
        rank: own rank in the step or the mpirun.
        ranks: number of ranks.
        ranks_here: ranks on this host.
        cpus_here: CPUs of the step, or of the job, on this host.
        cpus_per_node: CPUs of the job on each of its nodes.
        cpus_per_task: what `--cpus-per-task` said.
        memory_here: bytes that the job may use on this host. (srun outside an allocation does not set it; cgroups do.)
        end: Unix time at which the time limit ends the job.
        het: the parts of a heterogeneous job; empty for others.
        restarts: how often the job was requeued.
        array_task: index within a job array.
    """

    kind: str = ""
    job: str = ""
    step: str = ""
    nodes: tuple[str, ...] = ()
    node: int | None = None
    rank: int = 0
    ranks: int = 1
    ranks_here: int | None = None
    cpus_here: int | None = None
    cpus_per_node: tuple[int, ...] = ()
    cpus_per_task: int | None = None
    memory_here: int | None = None
    end: float | None = None
    het: tuple[HetGroup, ...] = ()
    restarts: int = 0
    array_task: int | None = None

    @property
    def in_step(self) -> bool:
        """True if srun started this process, directly or through a shell."""
        return bool(self.step)

    @property
    def cpus_meant(self) -> int | None:
        """CPUs that the user requested per task; else those of the job on this host, which are for its one task."""
        if self.cpus_per_task:
            return self.cpus_per_task
        job = self.cpus_per_node[self.node] if self.node is not None and self.node < len(self.cpus_per_node) else 0
        return max(job, self.cpus_here or 0) or None


def read_allocation(environ: Mapping[str, str] | None = None, host: str | None = None) -> Allocation:
    """The allocation that the environment describes. Nothing is queried; a value that cannot be read counts as missing.

    Args:
        environ: the environment; None: ours.
        host: this host's name; None: the system's host name.
    """
    environ = os.environ if environ is None else environ
    host = (host if host is not None else socket.gethostname()).partition(".")[0]
    if environ.get("SLURM_JOB_ID"):
        return _slurm(environ, host)
    if "PBS_NODEFILE" in environ:
        return _pbs(environ, host)
    kind, rank, ranks, here = _ranks(environ)
    if environ.get("FLUX_URI") or read_rank(FLUX, environ):
        job = environ.get("FLUX_JOB_ID", "")
        return Allocation(kind="flux", job=job, rank=rank, ranks=ranks, ranks_here=here)
    return Allocation(kind=kind, rank=rank, ranks=ranks, ranks_here=here)


def end_time(environ: Mapping[str, str] | None = None) -> float | None:
    """When the job's time limit ends it, as Unix time in seconds; None outside a job, without a limit, or where this
    Slurm does not say (before 23.02 there is no SLURM_JOB_END_TIME: see `ask_end_time`)."""
    environ = os.environ if environ is None else environ
    try:
        seconds = float(environ.get("SLURM_JOB_END_TIME", ""))
    except ValueError:
        return None
    return seconds if 0 < seconds < _NO_END_TIME else None


def run_command(
    line: Sequence[str], timeout: float | None, environ: Mapping[str, str] | None = None, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command, such as one of the batch system, to its end.

    What it prints may have any bytes: those that are no text in this locale are replaced.

    Args:
        timeout: seconds until it is killed; None for no limit.
        environ: its variables; None: those of this process.
        text: its standard input, which is empty otherwise.

    Raises:
        OSError: it cannot be run.
        subprocess.TimeoutExpired: it took longer.
    """
    given: dict[str, Any] = {"input": text} if text else {"stdin": subprocess.DEVNULL}
    return subprocess.run(
        line,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        env=None if environ is None else dict(environ),
        check=False,
        **given,
    )


def ask_end_time(environ: Mapping[str, str] | None = None, timeout: float = 10.0) -> float | None:
    """`end_time`; where the batch system has set no variable, one query to Slurm, PBS or Flux. For one process of the
    job only.

    Args:
        timeout: seconds; a controller that does not answer by then counts as one that does not know.
    """
    environ = os.environ if environ is None else environ
    known = end_time(environ)
    query = _end_query(environ)
    if known is not None or query is None or "SLURM_JOB_END_TIME" in environ:
        return known
    line, read_end = query
    try:
        done = run_command(line, timeout, environ)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return read_end(done.stdout, time.time())


def _end_query(environ: Mapping[str, str]) -> tuple[list[str], Callable[[str, float], float | None]] | None:
    """The command that the batch system answers with the end of this job, and the reader of its answer."""
    if job := job_to_ask(environ):
        return ["squeue", "--noheader", "--jobs", job, "--format=%L"], _end_in_squeue
    if job := environ.get("PBS_JOBID", ""):
        return ["qstat", "-f", job], end_in_qstat
    if environ.get("FLUX_URI"):
        return ["flux", "job", "timeleft"], _end_in_flux
    return None


def _end_in_squeue(text: str, now: float) -> float | None:
    left = parse_time_left(text.partition("\n")[0])  # parts of a heterogeneous job have the same
    return None if left is None else now + left


def _end_in_flux(text: str, now: float) -> float | None:
    left = _read({"left": text.strip()}, "left", float, 0.0)
    return now + left if 0 < left < _NO_END_TIME else None


def end_in_qstat(text: str, now: float) -> float | None:
    """The end of a job, as Unix time, in what `qstat -f` prints of it; None for one without a limit.

    Args:
        text: the answer.
        now: Unix time.
    """
    fields = dict(re.findall(r"^ {4}([\w.]+) = (.*)$", text, re.MULTILINE))
    limit = parse_time_left(fields.get("Resource_List.walltime", ""))
    if limit is None:
        return None
    with contextlib.suppress(ValueError, OverflowError):
        return time.mktime(time.strptime(fields.get("stime", ""), "%a %b %d %H:%M:%S %Y")) + limit
    return now + limit - (parse_time_left(fields.get("resources_used.walltime", "")) or 0.0)


def job_to_ask(environ: Mapping[str, str]) -> str:
    """This job's id in questions and orders to Slurm; "" outside of Slurm. One task of every array has the id of the
    whole array, and what is done to that is done to all tasks."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID", "")


def parse_time_left(text: str) -> float | None:
    """Seconds in squeue's `1-02:03:04`, `03:04` or `4`; None for UNLIMITED, INVALID and the like."""
    match = _TIME_LEFT.fullmatch(text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _slurm(environ: Mapping[str, str], host: str) -> Allocation:
    job_nodes, het = _slurm_nodes(environ)
    step = _step(environ)
    nodes = _nodes(environ, "SLURM_STEP_NODELIST") if step else ()
    nodes = nodes or job_nodes
    _, rank, ranks, here = _ranks(environ)
    counts = _job_counts(environ, len(het))
    cpus_here = _cpus_here(environ, host, job_nodes, counts)
    return Allocation(
        kind="slurm",
        job=environ["SLURM_JOB_ID"],
        step=step,
        nodes=nodes,
        node=_index(environ, host, nodes),
        rank=rank,
        ranks=ranks,
        ranks_here=here,
        cpus_here=cpus_here,
        cpus_per_node=counts,
        cpus_per_task=_read(environ, "SLURM_CPUS_PER_TASK", int, None),
        memory_here=_memory(environ, cpus_here),
        end=end_time(environ),
        het=het,
        restarts=_read(environ, "SLURM_RESTART_COUNT", int, 0),
        array_task=_read(environ, "SLURM_ARRAY_TASK_ID", int, None),
    )


def _slurm_nodes(environ: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[HetGroup, ...]]:
    """Nodes of the whole job, and its parts if it is heterogeneous."""
    parts = _read(environ, "SLURM_HET_SIZE", int, 0)
    het = []
    for index in range(parts):
        names = [f"SLURM_JOB_NODELIST_HET_GROUP_{index}", f"SLURM_NODELIST_HET_GROUP_{index}"]
        nodes = next((found for name in names if (found := _nodes(environ, name))), ())
        het.append(HetGroup(environ.get(f"SLURM_JOB_ID_HET_GROUP_{index}", ""), nodes))
    if het:
        return tuple(node for group in het for node in group.nodes), tuple(het)
    one = _nodes(environ, "SLURM_JOB_NODELIST") or _nodes(environ, "SLURM_NODELIST")
    return one, ()


def _job_counts(environ: Mapping[str, str], parts: int) -> tuple[int, ...]:
    names = [f"SLURM_JOB_CPUS_PER_NODE_HET_GROUP_{index}" for index in range(parts)] or ["SLURM_JOB_CPUS_PER_NODE"]
    return tuple(count for name in names for count in _counts(environ, name))


def _step(environ: Mapping[str, str]) -> str:
    """The id of the user's own step that we are in. The batch script and salloc's shell are no such step."""
    number = environ.get("SLURM_STEP_ID", "")
    return number if number.isdecimal() and int(number) < _FIRST_SPECIAL_STEP else ""


def _values_are_of_this_node(environ: Mapping[str, str], host: str) -> bool:
    """True if values of one node are this node's; mpirun copies those of its own node to all nodes."""
    if "OMPI_COMM_WORLD_SIZE" not in environ and "PMI_SIZE" not in environ:
        return True
    return environ.get("SLURMD_NODENAME", host).partition(".")[0] == host


def _index(environ: Mapping[str, str], host: str, nodes: tuple[str, ...]) -> int | None:
    if _values_are_of_this_node(environ, host):
        name = environ.get("SLURMD_NODENAME", "")  # a site may give its nodes other names than its hosts
        if name in nodes:
            return nodes.index(name)
    short = [node.partition(".")[0] for node in nodes]
    return short.index(host) if host in short else None


def _cpus_here(environ: Mapping[str, str], host: str, nodes: tuple[str, ...], counts: tuple[int, ...]) -> int | None:
    if _values_are_of_this_node(environ, host):
        number = _read(environ, "SLURM_CPUS_ON_NODE", int, None)
        if number:
            return number
    index = _index(environ, host, nodes)
    return counts[index] if index is not None and index < len(counts) else None


def _memory(environ: Mapping[str, str], cpus: int | None) -> int | None:
    """Bytes; Slurm counts in MB, and 0 stands for all that the node has."""
    whole = _read(environ, "SLURM_MEM_PER_NODE", int, 0)
    if whole:
        return whole * _MB
    each = _read(environ, "SLURM_MEM_PER_CPU", int, 0)
    if each and cpus:
        return each * cpus * _MB
    per_gpu = _read(environ, "SLURM_MEM_PER_GPU", int, 0)
    gpus = _read(environ, "SLURM_GPUS_ON_NODE", int, 0)
    return per_gpu * gpus * _MB or None


def _pbs(environ: Mapping[str, str], host: str) -> Allocation:
    slots: tuple[tuple[str, int], ...] = ()
    with contextlib.suppress(OSError), open(environ["PBS_NODEFILE"], encoding="utf-8", errors="replace") as file:
        slots = parse_hostfile(file.read())
    nodes = tuple(name.partition(".")[0] for name, _ in slots)
    _, rank, ranks, here = _ranks(environ)
    # A host is listed once for each of its MPI processes (mpiprocs), by default once; NCPUS is for each process.
    threads = _read(environ, "NCPUS", int, 0)
    return Allocation(
        kind="pbs",
        job=environ.get("PBS_JOBID", ""),
        nodes=nodes,
        node=nodes.index(host) if host in nodes else None,
        rank=rank,
        ranks=ranks,
        ranks_here=here,
        cpus_per_node=tuple(max(count, threads) for _, count in slots),
    )


def _ranks(environ: Mapping[str, str]) -> tuple[str, int, int, int | None]:
    """(launcher, own rank, ranks, ranks on this host); ("", 0, 1, None) without a launcher."""
    found = read_rank(OPEN_MPI, environ) or read_rank(FLUX, environ)
    if found is None and _step(environ) and environ.get("SLURM_STEP_NUM_TASKS"):
        counts = _counts(environ, "SLURM_STEP_TASKS_PER_NODE")
        node = _read(environ, "SLURM_NODEID", int, 0)
        here = counts[node] if node < len(counts) else None
        return "srun", _read(environ, "SLURM_PROCID", int, 0), _read(environ, "SLURM_STEP_NUM_TASKS", int, 1), here
    found = found or read_other_rank(environ)
    return ("", 0, 1, None) if found is None else ("mpirun", found.rank, found.size, found.here or None)


def _nodes(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    nothing: tuple[str, ...] = ()
    return _read(environ, name, expand_nodes, nothing)


def _counts(environ: Mapping[str, str], name: str) -> tuple[int, ...]:
    nothing: tuple[int, ...] = ()
    return _read(environ, name, expand_counts, nothing)


def _read(environ: Mapping[str, str], name: str, kind: Callable[[str], _T], otherwise: _T) -> _T:
    """A variable's value; `otherwise` when it is not set, or not what it should be."""
    text = environ.get(name, "")
    try:
        return kind(text) if text else otherwise
    except ValueError:
        return otherwise


_PART = re.compile(r"([^\[\],]*)(?:\[([^\]]*)\])?")
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_NUMBERED = re.compile(r"(.*?)(\d+)")
_MAX_NODES = 1 << 20


def expand_nodes(text: str) -> tuple[str, ...]:
    """`n[1-3,7],gpu[01-04]` as `n1 n2 n3 n7 gpu01 …`, in order; several brackets in one name are allowed.

    Raises:
        ValueError: it is not a list of nodes; the message shows it.
    """
    found: list[str] = []
    for word in _words(text):
        found += _expand_word(word, text)
        if len(found) > _MAX_NODES:
            raise ValueError(f"{text[:200]!r} names more than {_MAX_NODES} nodes")
    return tuple(found)


def compress_nodes(nodes: Iterable[str]) -> str:
    """`n1 n2 n3 n7 x` as `n[1-3,7],x`: the way back, for people to read. Sorted; numbers at the end only."""
    groups: dict[tuple[str, int], list[int]] = {}
    alone = []
    for node in set(nodes):
        match = _NUMBERED.fullmatch(node)
        if match is None:
            alone.append(node)
        else:
            groups.setdefault((match[1], len(match[2]) if match[2].startswith("0") else 0), []).append(int(match[2]))
    found = list(alone)
    for (name, width), numbers in groups.items():
        runs: list[list[int]] = []
        for number in sorted(numbers):
            if runs and number == runs[-1][1] + 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        texts = [f"{a:0{width}d}" if a == b else f"{a:0{width}d}-{b:0{width}d}" for a, b in runs]
        found.append(f"{name}{texts[0]}" if len(numbers) == 1 else f"{name}[{','.join(texts)}]")
    return ",".join(sorted(found))


def expand_counts(text: str) -> tuple[int, ...]:
    """`16(x2),8` as (16, 16, 8): one number per node.

    Raises:
        ValueError: it is not such a list.
    """
    found: list[int] = []
    for word in filter(None, text.split(",")):
        match = _REPEATED.fullmatch(word.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a list of numbers such as 16(x2),8")
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


def parse_hostfile(text: str) -> tuple[tuple[str, int], ...]:
    """Hosts and slots of a hostfile, in order, a host that is named again counted up.

    Takes `host`, `host slots=4` (Open MPI), `host:4` (MPICH) and one line per slot (PBS).
    """
    slots: dict[str, int] = {}
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        host, _, number = words[0].partition(":")
        given = [word.removeprefix("slots=") for word in words[1:] if word.startswith("slots=")]
        count = (given or [number])[0]
        slots[host] = slots.get(host, 0) + (int(count) if count.isdecimal() else 1)
    return tuple(slots.items())


def _words(text: str) -> Iterator[str]:
    """The parts between commas that stand outside brackets."""
    depth = start = 0
    for index, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise ValueError(f"{text!r} is not a list of nodes: its brackets do not match")
        if letter == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    if depth:
        raise ValueError(f"{text!r} is not a list of nodes: its brackets do not match")
    yield text[start:]


def _expand_word(word: str, text: str) -> list[str]:
    names = [""]
    for match in _PART.finditer(word.strip()):
        ends = [match[1]] if match[2] is None else [match[1] + number for number in _numbers(match[2], text)]
        names = [name + end for name in names for end in ends]
    return [name for name in names if name]


def _numbers(ranges: str, text: str) -> Iterator[str]:
    """`01-03,7` as `01 02 03 7`: the first number's width is kept."""
    for part in ranges.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or int(last) - int(first) > _MAX_NODES:
            raise ValueError(f"{text!r} is not a list of nodes: {part!r} is no range")
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"
