"""`hpcray doctor` in a Slurm allocation: the job as a whole, its clocks, and one step that examines every node.

Its tasks, `python -m hpcray.state.doctor_step`, read lines from stdin and answer on stdout: `ping N` with the time,
`report` with the steps of the examination and then with the findings. The end of the input ends a task.

The lines are short, since the tasks of a step share srun's stdout. slurmstepd sends whole lines to srun only while they
are shorter than its messages of 1024 bytes (`MAX_MSG_LEN`, `_task_build_message` in slurmd/slurmstepd/io.c). A longer
line goes in pieces, and output of another node lands between them. So `cut` divides an answer, and `AnswerAssembler`
puts it together again, by node.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from hpcray.platform.allocation import Allocation, ask_end_time, compress_nodes
from hpcray.state.doctor import FAIL, NOTE, OK, WARN, DoctorFinding, examine

MARK = "HPCRAY-DOCTOR "  # begins each line: a site's profile may print others, and srun may put a label before
LINE = 512  # most bytes of a line, with its end: half of the bytes that Slurm keeps together
SENDING = "sending its report"
_PART = re.compile(r"(\S+) (\d+)/(\d+) (.*)", re.DOTALL)
_NUMBERS_BYTES = 16  # for "i/n" and the blanks
_LITTLE_TIME = 600.0  # seconds left of the job
_SKEW = 1.0  # seconds between clocks: a warning
_LARGE_SKEW = 60.0  # a failure
_SILENCE_TIMEOUT = 45.0  # seconds without a line from any awaited node: no step of an examination takes as long
_PROGRESS_INTERVAL = 10.0  # seconds between lines about awaited nodes
_PING_TIMEOUT = 5.0  # seconds
_PINGS = 5
_EXIT_TIMEOUT = 10.0  # seconds for the end of the step
_EXIT_TIMEOUT_STUCK = 2.0  # the same where nodes have not reported
_UNBUFFERED = "SLURM_UNBUFFEREDIO"
_STARTING = "starting"
_NOT_REACHED = "started, but the question has not come to it"
_slurm = partial(DoctorFinding, "Slurm")
_skew = partial(DoctorFinding, "clocks", "skew")


def examine_job(given: Allocation, mpi: str, problem: str, environ: Mapping[str, str]) -> list[DoctorFinding]:
    """Findings about the job as a whole, from this host. Queries Slurm's controller once, for the time left.

    Args:
        given: the allocation.
        mpi: srun's start-up protocol for this MPI library.
        problem: why srun cannot use it, "" if it can.
        environ: the environment.
    """
    count = len(given.nodes)
    text = f"job {given.job}, {count} node{'s' * (count != 1)}: {compress_nodes(given.nodes)}"
    found = [_slurm("allocation", text, OK)]
    if given.het:
        parts = " + ".join(f"{len(group.nodes)} ({group.job})" for group in given.het)
        found.append(_slurm("heterogeneous", f"parts of {parts} nodes", NOTE))
    if given.restarts:
        found.append(_slurm("requeued", f"{given.restarts} times"))
    hint = "ask the site for it; until then hpcray-launch uses mpirun, which ends the job when a node is lost"
    found.append(_slurm(f"srun --mpi={mpi}", problem or "works", FAIL if problem else OK, hint if problem else ""))
    found.append(_time_left(ask_end_time(environ)))
    if count > 1:
        # Neither the environment nor scontrol shows --no-kill.
        value = "the job ends with the first one, unless it was submitted with --no-kill"
        found.append(_slurm("loss of a node", value, NOTE, "#SBATCH --no-kill; hpcray-launch adds srun's part"))
    return found


def _time_left(end: float | None) -> DoctorFinding:
    if end is None:
        return _slurm("time left", "no limit, or not known")
    left = end - time.time()
    little = left < _LITTLE_TIME
    minutes = max(0, int(left)) // 60
    shown = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
    hint = "the job ends soon: work that takes longer is lost without a checkpoint" if little else ""
    return _slurm("time left", shown, WARN if little else OK, hint)


def judge_clocks(offsets: Mapping[str, tuple[float, float]]) -> DoctorFinding:
    """The skew of the nodes' clocks.

    Args:
        offsets: by node, how much its clock is ahead of this host's, and how uncertain that is, both in seconds.
    """
    if len(offsets) < 2:
        return _skew("measured on several nodes only")
    ahead = max(offsets, key=lambda node: offsets[node][0])
    behind = min(offsets, key=lambda node: offsets[node][0])
    unsure = offsets[ahead][1] + offsets[behind][1]
    skew = max(0.0, offsets[ahead][0] - offsets[behind][0] - unsure)
    value = f"{skew:.3f} s at least, give or take {unsure:.3f} s"
    if skew < _SKEW:
        return _skew(f"less than {max(0.01, skew + 2 * unsure):.2f} s", OK)
    hint = "the nodes need NTP: times in logs, time limits and make-like tools go wrong"
    return _skew(f"{ahead} is ahead of {behind}: {value}", FAIL if skew >= _LARGE_SKEW else WARN, hint)


@dataclass
class NodeReports:
    """The answers of the nodes.

    Attributes:
        reports: findings by node; for a node that started and did not report, a failure with its last step.
        offsets: by node, how much its clock is ahead of this host's, and how uncertain that is, both in seconds.
        missing: nodes that did not start.
        complaint: srun's standard error; without any, where nodes are missing: whether the step ended, or the time of
            silence.
    """

    reports: dict[str, list[DoctorFinding]] = field(default_factory=dict)
    offsets: dict[str, tuple[float, float]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    complaint: str = ""


def examine_nodes(line: Sequence[str], nodes: Sequence[str]) -> NodeReports:
    """Run `line` (srun and the `remote` module) and query every node for its findings and its time.

    Nodes that are silent for 45 s are given up; meanwhile stderr names the awaited nodes.

    Returns:
        The answers that arrived in time; the step has ended.
    """
    found = NodeReports()
    try:
        step = _DoctorStep(line)
    except OSError as error:
        return NodeReports(missing=list(nodes), complaint=f"{line[0]}: {error.strerror}")
    over = False
    try:
        came = {answer["node"] for answer in step.collect(set(nodes), "hello", _SILENCE_TIMEOUT)}
        _compare_clocks(step, came, found)
        if came:
            step.send("report")
            for answer in step.collect(came, "findings", _SILENCE_TIMEOUT):
                found.reports[answer["node"]] = [DoctorFinding(**finding) for finding in answer["findings"]]
        over = step.over
    finally:
        found.complaint = step.leave(_EXIT_TIMEOUT if len(found.reports) == len(nodes) else _EXIT_TIMEOUT_STUCK)
    found.missing = [node for node in nodes if node not in came]
    if found.missing and not found.complaint:
        found.complaint = "the step ended" if over else f"no word for {_SILENCE_TIMEOUT:g} s"
    silent = {node: [_no_report(node, step.at(node), found.complaint, over)] for node in came}
    found.reports = {node: {**silent, **found.reports}[node] for node in nodes if node in came}
    return found


def _no_report(node: str, at: str, complaint: str, over: bool) -> DoctorFinding:
    """The finding for a node that fell silent in its step `at`, or whose task ended (`over`: the whole step did)."""
    lines = complaint.splitlines()
    why = f"no word for {_SILENCE_TIMEOUT:g} s" if not over else lines[0] if lines else "the step ended"
    why = next((line for line in lines if re.search(rf"\b{re.escape(node)}\b", line)), why)
    hint = "a file system or a device that hangs there? srun --overlap -N1 -n1 -w NODE hpcray doctor --here"
    return DoctorFinding("nodes", "no report", f"{at}; {why}", FAIL, hint)


def _compare_clocks(step: _DoctorStep, nodes: set[str], found: NodeReports) -> None:
    """Several rounds of pings; for each node the one with the shortest round trip counts. A node that misses a round is
    left out of the next."""
    for turn in range(_PINGS):
        if not nodes:
            return
        sent = time.time()
        step.send(f"ping {turn}")
        answers = step.collect(nodes, "pong", _PING_TIMEOUT, str(turn))
        for answer in answers:
            half = (answer["came"] - sent) / 2
            offset = (answer["time"] - sent - half, half)
            best = found.offsets.get(answer["node"])
            if best is None or half < best[1]:
                found.offsets[answer["node"]] = offset
        nodes = {answer["node"] for answer in answers}


class _DoctorStep:
    """The running step of srun."""

    def __init__(self, line: Sequence[str]) -> None:
        # Unbuffered, srun would cut between lines too.
        environ = {name: value for name, value in os.environ.items() if name != _UNBUFFERED}
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, env=environ)
        assert self._child.stdin is not None and self._child.stdout is not None and self._child.stderr is not None
        self._input = self._child.stdin
        self._selector = selectors.DefaultSelector()
        self._text = {self._child.stdout.fileno(): b"", self._child.stderr.fileno(): b""}
        self._out, self._err = self._text
        self._answers = AnswerAssembler()
        self._at: dict[str, str] = {}
        for fd in self._text:
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ)

    @property
    def over(self) -> bool:
        """True if the step has closed its output."""
        return not self._selector.get_map()

    def at(self, node: str) -> str:
        """The last known step of a node's examination."""
        return self._at.get(node, _STARTING)

    def send(self, text: str) -> None:
        """Send a line to every task."""
        with contextlib.suppress(BrokenPipeError):  # the step has ended
            self._input.write(text.encode() + b"\n")
            self._input.flush()

    def collect(self, nodes: set[str], kind: str, timeout: float, value: str = "") -> list[dict[str, Any]]:
        """Answers of this kind, one from each node, until the missing ones are silent for `timeout` seconds;
        "came" in each answer is its time."""
        last = reported = time.monotonic()  # the last answer, the last line about progress
        found: dict[str, dict[str, Any]] = {}
        while (missing := nodes.difference(found)) and self._text.keys() & self._selector.get_map().keys():
            now = time.monotonic()
            if now >= last + timeout:
                break
            if now >= reported + _PROGRESS_INTERVAL:
                reported = now
                self._report_progress(missing)
            for answer in self._read(min(last + timeout, reported + _PROGRESS_INTERVAL) - now):
                if answer["node"] in missing:
                    last = time.monotonic()
                if kind in answer and (not value or answer[kind] == value):
                    found[answer["node"]] = answer
        return list(found.values())

    def _report_progress(self, nodes: Iterable[str]) -> None:
        by_state: dict[str, list[str]] = {}
        for node in sorted(nodes):
            by_state.setdefault(self.at(node), []).append(node)
        waits = "; ".join(f"{compress_nodes(names)}: {state}" for state, names in by_state.items())
        print(f"hpcray doctor: waiting for {waits}", file=sys.stderr, flush=True)

    def leave(self, grace: float) -> str:
        """End the step: its input first, after `grace` seconds srun, which then kills the tasks.

        Returns:
            Its standard error up to the request to end.
        """
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self._drain(grace)
        complaint = self._text[self._err].decode(errors="replace").strip()
        for end in (self._child.terminate, self._child.kill):
            try:
                self._child.wait(_EXIT_TIMEOUT if self.over else 0.0)
                break
            except subprocess.TimeoutExpired:
                end()
                self._drain(_EXIT_TIMEOUT)
        self._child.wait()
        self._selector.close()
        for stream in (self._child.stdout, self._child.stderr):
            if stream is not None:
                stream.close()
        return complaint

    def _drain(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._selector.get_map() and time.monotonic() < deadline:
            self._read(deadline - time.monotonic())

    def _read(self, timeout: float) -> list[dict[str, Any]]:
        """Wait for output, keep the nodes' current steps for `at`, and return the complete answers."""
        for key, _ in self._selector.select(max(0.0, timeout)):
            more = os.read(key.fd, 65536)
            if more:
                self._text[key.fd] += more
            else:
                self._selector.unregister(key.fd)
        now = time.time()
        *lines, self._text[self._out] = self._text[self._out].split(b"\n")
        answers = [self._answers.feed(line.decode(errors="replace")) for line in lines]
        for answer in filter(None, answers):
            self._at[answer["node"]] = answer.get("at") or self._at.get(answer["node"], _NOT_REACHED)
        return [{**answer, "came": now} for answer in answers if answer]


def cut(node: str, answer: dict[str, Any]) -> str:
    """The lines of an answer, ASCII.

    Args:
        node: name of the node; no blanks.
        answer: for JSON.
    """
    text = json.dumps(answer)
    room = LINE - len(MARK) - len(node.encode()) - _NUMBERS_BYTES
    parts = [text[start : start + room] for start in range(0, len(text), room)]
    return "".join(f"{MARK}{node} {i}/{len(parts)} {part}\n" for i, part in enumerate(parts, 1))


class AnswerAssembler:
    """Puts the nodes' lines together again, in whatever order those of different nodes come."""

    def __init__(self) -> None:
        self._parts: dict[str, list[str]] = {}

    def feed(self, line: str) -> dict[str, Any]:
        """Take in one line, without its end.

        Returns:
            The answer that it completes, with "node"; for a part before the last, that the node is `SENDING`; {} for a
            line of another program, or of an answer of which a part was lost.
        """
        found = _PART.fullmatch(line.partition(MARK)[2])
        if found is None:
            return {}
        node, number, count, text = found[1], int(found[2]), int(found[3]), found[4]
        parts = self._parts.setdefault(node, [])
        if number == 1:
            parts.clear()
        if len(parts) != number - 1:
            return {}
        parts.append(text)
        if number < count:
            return {"node": node, "at": SENDING}
        try:
            answer = json.loads("".join(self._parts.pop(node)))
        except ValueError:
            return {}
        return {**answer, "node": node} if isinstance(answer, dict) else {}


def main() -> None:
    """Answer until the input ends.

    Options: `--require-rdma`: its absence is a failure. `--without-mpi`: srun cannot start MPI programs, and the step
    was started without; do not examine the start-up protocol.
    """
    require_rdma, with_mpi = "--require-rdma" in sys.argv[1:], "--without-mpi" not in sys.argv[1:]
    _answer(hello=True)
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "ping":
            _answer(pong=rest, time=time.time())
        elif word == "report":
            found = examine(require_rdma, with_mpi, lambda step: _answer(at=step))
            _answer(findings=[asdict(finding) for finding in found])


def _answer(**what: Any) -> None:
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    sys.stdout.write(cut(node, what))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
