"""How a job has ended, and why: what the batch system says, what the history has, and where the two disagree."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hpcray.history.job_history import JobHistory, NodePart, clock, essence
from hpcray.history.runs import boot_id
from hpcray.platform.allocation import run_command
from hpcray.platform.process_tree import ProcessIdentity

RUNNING, COMPLETED, FAILED, CANCELLED, KILLED, SILENT = (
    "RUNNING", "COMPLETED", "FAILED", "CANCELLED", "KILLED", "LAST_SEEN",
)  # fmt: skip
"""States of a job by its history. KILLED: its processes are gone without a word. LAST_SEEN: nothing was heard since."""
_SLURM_TIME = 10.0  # seconds that Slurm's commands may take
_FRESH = 75.0  # seconds since the last sign of life for which a job of another host may live
_SIGKILLED = 128 + 9
_NOT_OVER = (
    RUNNING,
    "PENDING",
    "CONFIGURING",
    "COMPLETING",
    "SUSPENDED",
    "STOPPED",
    "SIGNALING",
    "STAGE_OUT",
    "RESIZING",
)
_LAST_LINES = 8
_LONGEST = 5
_FIELDS = (
    "JobID", "State", "ExitCode", "DerivedExitCode", "Start", "End", "Elapsed", "Timelimit", "NodeList", "ReqMem",
    "MaxRSS", "AllocCPUS", "TotalCPU", "Reason",
)  # fmt: skip
_ENDS = {
    "TIMEOUT": "it reached its time limit",
    "DEADLINE": "it reached its deadline",
    "OUT_OF_MEMORY": "it used more memory than it had requested",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node could not be booted",
    "PREEMPTED": "another job took its nodes",
    "CANCELLED": "it was cancelled",
    "FAILED": "its batch script or a step failed",
    "COMPLETED": "its batch script ended with code 0",
    "REQUEUED": "it was put back into the queue",
}


@dataclass(frozen=True)
class SlurmRecord:
    """The word of Slurm on a job. source: the command that said it. facts: Slurm's own words, by Slurm's names."""

    state: str
    text: str
    source: str
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """How a job has ended.

    Attributes:
        state: Slurm's word if Slurm knows, else that of the history. by_history: the history's.
        cause: one sentence. code: exit code of the program, None: not known.
        slurm: what Slurm says; None: it is not here, or does not know the job.
        disagreement: how the two differ; "" if they do not.
    """

    state: str
    by_history: str
    cause: str
    code: int | None = None
    slurm: SlurmRecord | None = None
    disagreement: str = ""


def outcome(history: JobHistory, slurm: SlurmRecord | None = None, now: float | None = None) -> Outcome:
    """How the job has ended.

    Args:
        history: of the run.
        slurm: what Slurm says of it.
        now: Unix time.
    """
    now = time.time() if now is None else now
    over = slurm is not None and slurm.state not in _NOT_OVER
    state, cause, code = _by_history(history, now, over)
    found = Outcome(state, state, cause, code)
    found.slurm = slurm
    if slurm is not None and slurm.state:
        found.state = slurm.state
        well = slurm.state == COMPLETED
        if slurm.state not in (RUNNING, "PENDING") and state != SILENT and well != (state == COMPLETED):
            found.disagreement = f"Slurm says {slurm.state}, and the history says {state}"
            if state == KILLED and not well:
                found.disagreement = ""  # Slurm says who killed it
    return found


def _by_history(history: JobHistory, now: float, over: bool) -> tuple[str, str, int | None]:
    """State, cause and exit code. over: Slurm says that the run is over, however lately something was heard of it."""
    ended = [node for node in history.nodes.values() if node.ended is not None]
    codes = [node.ended.code for node in ended if node.ended is not None]
    code = next((one for one in codes if one), 0) if codes else None
    silent = [node for node in history.nodes.values() if node.ended is None and not node.lost and node.began]
    cause = _first_cause(history)
    if ended and (not silent or history.head.ended is not None):
        if not code:
            return COMPLETED, "the program ended by itself, without an uncaught exception", 0
        kind = history.reasons[0][1].kind if history.reasons else ""
        if kind == "driver" or code == _SIGKILLED:
            return KILLED, f"{cause or 'the program was killed'}; nothing was heard since {clock(history.last)}", code
        state = CANCELLED if kind in ("signal", "interrupt", "drain") else FAILED
        return state, cause or f"the job ended with exit code {code}", code
    losses = [reason for _, reason in history.reasons if reason.kind in ("head", "node")]
    if ended and losses and code:
        return FAILED, losses[0].text, code
    if any(_lives(node) for node in silent):
        return RUNNING, "its processes run on this host", None
    told = f"; before that: {cause}" if cause else ""
    last, here = history.last, [node for node in silent if node.began is not None and _is_here(node)]
    if here and len(here) == len(silent):
        if (broken := next((node for node in silent if node.breaks_off), None)) is not None:
            known = f"node {broken.number}, last record {clock(broken.last)}"
            return SILENT, f"how it ended is not known: {broken.breaks_off} ({known}){told}", None
        number = here[0].began.pid if here[0].began is not None else 0
        return (
            KILLED,
            f"its processes were killed: they are gone from host {socket.gethostname()} (raylet of node "
            f"{here[0].number}, pid {number}) without a word about an end, as after SIGKILL, a kill by the kernel for "
            f"lack of memory, or a crash of the host; nothing was heard since {clock(last)}{told}",
            None,
        )
    if now - last < _FRESH and not ended and not over:
        return RUNNING, f"it was heard of {now - last:.0f} s ago", None
    hosts = ", ".join(sorted({node.began.host for node in silent if node.began is not None})[:5])
    return (
        SILENT,
        f"nothing was heard of it since {clock(last)}, and no word about an end: its processes on {hosts} were killed, "
        f"or these hosts are down, or cannot write here{told}",
        None,
    )


def _first_cause(history: JobHistory) -> str:
    """The first reason of an end; of a program that ended with an exit code, the exception of which it did."""
    reasons = [reason for _, reason in history.reasons]
    if not reasons:
        return ""
    first = reasons[0]
    if first.kind == "exception":
        return f"the program raised an exception: {essence(first.text)}"
    if first.kind == "interrupt":
        return "the program was interrupted (SIGINT, Ctrl-C)"
    return first.text


def _is_here(node: NodePart) -> bool:
    return node.began is not None and node.began.host == socket.gethostname()


def _lives(node: NodePart) -> bool:
    began = node.began
    if began is None or not _is_here(node) or began.boot != boot_id():
        return False
    found = ProcessIdentity.of(began.pid)
    return found is not None and found.started == began.started


# ---------------------------------------------------------------- Slurm


def ask_slurm(history: JobHistory, run: Callable[..., str | None] | None = None) -> SlurmRecord | None:
    """The word of Slurm on the run: from the accounting, else from the controller; None where neither knows.

    Args:
        history: of the run; of a job that Slurm does not know by number nothing is asked.
        run: runs a command and returns its output, None if it failed.
    """
    run = _output if run is None else run
    job = history.run.job
    if not job.replace("_", "").isdecimal() or not any(node.began and node.began.slurm for node in _nodes(history)):
        return None
    return _from_accounting(run, job, history) or _from_controller(run, job, history)


def _nodes(history: JobHistory) -> Sequence[NodePart]:
    return list(history.nodes.values())


def _from_accounting(run: Callable[..., str | None], job: str, history: JobHistory) -> SlurmRecord | None:
    text = run("sacct", "-D", "-n", "-P", "-j", job, "-o", ",".join(_FIELDS))
    rows = [dict(zip(_FIELDS, line.split("|"), strict=False)) for line in (text or "").splitlines() if "|" in line]
    tops = [row for row in rows if row["JobID"] == job]
    if not tops:
        return None
    began = history.started
    matching = [row for row in tops if _time(row["Start"]) <= began + 60 and _time(row["End"], now=True) >= began]
    top = (matching or tops)[-1]
    word, _, rest = top["State"].partition(" ")
    facts = {name: value for name, value in top.items() if value and value not in ("Unknown", "None")}
    peak = max((row.get("MaxRSS", "") for row in rows if row["JobID"].startswith(f"{job}.")), key=_size, default="")
    if peak:
        facts["MaxRSS"] = peak
    return SlurmRecord(word.rstrip("+"), _sentence(word.rstrip("+"), rest, facts), "sacct", facts)


def _from_controller(run: Callable[..., str | None], job: str, history: JobHistory) -> SlurmRecord | None:
    text = run("scontrol", "show", "job", "-o", job)
    facts = dict(word.partition("=")[::2] for word in (text or "").split("\n")[0].split() if "=" in word)
    state = facts.get("JobState", "")
    if not state:
        return None
    restarts = next((node.began.slurm.get("SLURM_RESTART_COUNT", "0") for node in _nodes(history) if node.began), "0")
    if facts.get("Restarts", "0") != restarts:
        return SlurmRecord("", f"Slurm put it back into the queue after this run; it is {state} now", "scontrol", facts)
    chosen = {
        new: facts[old]
        for new, old in {
            "ExitCode": "ExitCode", "Elapsed": "RunTime", "Timelimit": "TimeLimit", "Start": "StartTime",
            "End": "EndTime", "NodeList": "NodeList", "AllocCPUS": "NumCPUs", "Reason": "Reason",
        }.items()
        if facts.get(old, "Unknown") not in ("Unknown", "None", "(null)")
    }  # fmt: skip
    return SlurmRecord(state, _sentence(state, "", chosen), "scontrol", chosen)


def _sentence(state: str, rest: str, facts: Mapping[str, str]) -> str:
    why = _ENDS.get(state, "")
    text = f"Slurm: {state}{f' {rest}' if rest else ''}{f': {why}' if why else ''}"
    shown = {
        "Elapsed": "ran for", "Timelimit": "time limit", "ExitCode": "exit code", "MaxRSS": "peak memory of a task",
        "ReqMem": "memory requested", "NodeList": "nodes",
    }  # fmt: skip
    parts = [f"{name} {facts[key]}" for key, name in shown.items() if facts.get(key)]
    return f"{text} ({', '.join(parts)})" if parts else text


def _time(text: str, now: bool = False) -> float:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return time.time() if now else 0.0


def _size(text: str) -> float:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    try:
        return float(text.rstrip("KMGTn")) * units.get(text[-1:], 1)
    except ValueError:
        return 0.0


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("SACCT_", "SLURM_TIME_FORMAT"))}
    try:
        done = run_command(command, _SLURM_TIME, environ)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if not done.returncode else None


# ---------------------------------------------------------------- for people


def explain(history: JobHistory, found: Outcome) -> list[tuple[int, str]]:
    """Why the job has ended, as lines with their depth."""
    lines: list[tuple[int, str]] = []
    if found.slurm is not None:
        lines.append((0, found.slurm.text))
    word = f"{found.by_history}: " if found.slurm is None else f"history: {found.by_history}: "
    lines.append((0, word + found.cause))
    if found.disagreement:
        lines.append((0, f"they disagree: {found.disagreement}"))
    if (found.slurm is not None and found.slurm.state == "OUT_OF_MEMORY") or _memory_deaths(history):
        lines += [(1, text) for text in _memory_peaks(history)]
    told = {(number, reason.kind, reason.text): reason.at for number, reason in reversed(history.reasons)}
    for (number, kind, text), at in [*reversed(told.items())][:_LAST_LINES]:  # each once, when it was told first
        lines.append((1, f"{clock(at)} node {number}: {kind}: {text.strip()}"))
    for node in history.nodes.values():
        if node.lost:
            lines.append((1, f"node {node.number} was declared dead at {clock(node.lost_at)}: {node.lost}"))
    deaths = history.deaths()
    for death in deaths[-_LAST_LINES:]:
        what = f"actor {_actor_name(history, death.actor)}" if death.actor else death.kind
        lines.append((1, f"{clock(death.gone)} node {death.node}: {what}, pid {death.pid}, died: {death.reason}"))
    for kind, text, count, first in history.errors_by_text()[:_LAST_LINES]:
        often = f"{count} times, first" if count > 1 else "once,"
        lines.append((1, f"tasks failed with {kind}: {text} ({often} at {clock(first.at)} on node {first.node})"))
    if found.by_history != COMPLETED:
        lines += _last_moments(history)
    lines += [(0, f"not complete: {text}") for text in history.complaints()]
    return lines


def _last_moments(history: JobHistory) -> list[tuple[int, str]]:
    lines: list[tuple[int, str]] = []
    running = sorted(history.running(), key=lambda item: item[3])
    last = history.last
    if running:
        lines.append((0, f"{len(running)} tasks ran when it was heard of last ({clock(last)}), the longest:"))
        for process, task, name, since in running[:_LONGEST]:
            text = f"{name} {task.hex()} for {last - since:.1f} s on node {process.node}, pid {process.pid}"
            lines.append((1, text))
    if queued := history.queued():
        names = ", ".join(f"{name} ({count})" for name, count in sorted(queued.items(), key=lambda row: -row[1])[:5])
        lines.append((0, f"not yet sent: {names}"))
    seen = [
        f"node {node.number} on {node.began.host}: last sign of life {clock(node.last)}"
        + (f", {last - node.last:.0f} s before the job's" if last - node.last >= 1 else "")
        for node in history.nodes.values()
        if node.began is not None
    ]
    lines += [(0, text) for text in sorted(seen)[:20]]
    if history.lines:
        lines.append((0, "last lines of the raylets:"))
        for number, line in history.lines[-_LAST_LINES:]:
            lines.append((1, f"{clock(line.at)} node {number}: {line.text.splitlines()[0] if line.text else ''}"))
    return lines


def _memory_deaths(history: JobHistory) -> bool:
    return any(death.exit == "NODE_OUT_OF_MEMORY" for death in history.deaths())


def _memory_peaks(history: JobHistory) -> list[str]:
    texts = []
    for node in history.nodes.values():
        rows = [(row["memory"]["used"], row["memory"]["limit"], at) for at, row in node.figures if row.get("memory")]
        if rows:
            used, limit, at = max(rows)
            texts.append(f"node {node.number}: most memory that was seen: {used / 2**30:.2f} of {limit / 2**30:.2f} GiB"
                         f" at {clock(at)}")  # fmt: skip
    return texts[:20]


def _actor_name(history: JobHistory, actor: bytes) -> str:
    row = history.actors.get(actor, {})
    return f"{row.get('class_name', '')} {actor.hex()}".strip()
