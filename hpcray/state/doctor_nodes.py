"""The doctor on every node of an allocation: one step, and a talk with its tasks over srun's stdin and stdout."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcray.host.allocation_nodes import compress_nodes
from hpcray.state.findings import FAIL, Finding
from hpcray.state.node_lines import Answers

_PATIENCE = 45.0
"""Seconds without a word from any of the nodes that are waited for. No single look at a node may take as long."""
_TELL_EVERY = 10.0
_PING_TIME = 5.0
_PINGS = 5
_LEAVE_TIME = 10.0
_LEAVE_TIME_STUCK = 2.0
_UNBUFFERED = "SLURM_UNBUFFEREDIO"
_STARTING = "starting"
_UNASKED = "started, but the question has not come to it"


@dataclass
class NodesSaid:
    """What the nodes answered.

    Attributes:
        reports: findings by node; of a node that started and did not report, a failure that says what it was at.
        offsets: by node, how much its clock is ahead of ours, and how uncertain that is, both in seconds.
        missing: nodes that did not start.
        complaint: what srun printed on stderr; else, where nodes are missing, whether the step ended or for how long
            nothing was heard.
    """

    reports: dict[str, list[Finding]] = field(default_factory=dict)
    offsets: dict[str, tuple[float, float]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    complaint: str = ""


def ask_nodes(line: Sequence[str], nodes: Sequence[str]) -> NodesSaid:
    """Run `line` (srun and the node_report module) and ask every node for its findings and its time.

    Nodes that say nothing for 45 s are not waited for; while it waits, stderr tells for whom.

    Returns:
        What came within the time; nothing of the step is left.
    """
    said = NodesSaid()
    try:
        step = _Step(line)
    except OSError as error:
        return NodesSaid(missing=list(nodes), complaint=f"{line[0]}: {error.strerror}")
    over = False
    try:
        came = {answer["node"] for answer in step.collect(set(nodes), "hello", _PATIENCE)}
        _compare_clocks(step, came, said)
        if came:
            step.say("report")
            for answer in step.collect(came, "findings", _PATIENCE):
                said.reports[answer["node"]] = [Finding(**finding) for finding in answer["findings"]]
        over = step.over
    finally:
        said.complaint = step.leave(_LEAVE_TIME if len(said.reports) == len(nodes) else _LEAVE_TIME_STUCK)
    said.missing = [node for node in nodes if node not in came]
    if said.missing and not said.complaint:
        said.complaint = "the step ended" if over else f"no word for {_PATIENCE:g} s"
    silent = {node: [_no_report(node, step.at(node), said.complaint, over)] for node in came}
    said.reports = {node: {**silent, **said.reports}[node] for node in nodes if node in came}
    return said


def _no_report(node: str, at: str, complaint: str, over: bool) -> Finding:
    """Of a node that started: it fell silent, or its task ended.

    Args:
        node: its name.
        at: what it was doing.
        complaint: what srun printed on stderr.
        over: whether the step had ended by itself.
    """
    lines = complaint.splitlines()
    why = f"no word for {_PATIENCE:g} s" if not over else lines[0] if lines else "the step ended"
    why = next((line for line in lines if re.search(rf"\b{re.escape(node)}\b", line)), why)
    hint = "a file system or a device that hangs there? srun --overlap -N1 -n1 -w NODE hpcray doctor --here"
    return Finding("nodes", "no report", f"{at}; {why}", FAIL, hint)


def _compare_clocks(step: _Step, nodes: set[str], said: NodesSaid) -> None:
    """Some rounds; for each node the answer with the shortest way there and back is the surest. A node that misses one
    is not waited for in the next."""
    for turn in range(_PINGS):
        if not nodes:
            return
        sent = time.time()
        step.say(f"ping {turn}")
        answers = step.collect(nodes, "pong", _PING_TIME, str(turn))
        for answer in answers:
            half = (answer["came"] - sent) / 2
            offset = (answer["time"] - sent - half, half)
            best = said.offsets.get(answer["node"])
            if best is None or half < best[1]:
                said.offsets[answer["node"]] = offset
        nodes = {answer["node"] for answer in answers}


class _Step:
    """The running step."""

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
        self._answers = Answers()
        self._at: dict[str, str] = {}
        for fd in self._text:
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ)

    @property
    def over(self) -> bool:
        """Whether it has ended, as far as its output tells."""
        return not self._selector.get_map()

    def at(self, node: str) -> str:
        """What a node was last known to be doing."""
        return self._at.get(node, _STARTING)

    def say(self, text: str) -> None:
        """A line to every task."""
        try:
            self._input.write(text.encode() + b"\n")
            self._input.flush()
        except BrokenPipeError:
            pass  # it has ended; nobody will answer

    def collect(self, nodes: set[str], kind: str, patience: float, value: str = "") -> list[dict[str, Any]]:
        """Answers of this kind, one from each node, until `patience` seconds bring no word of those that are missing;
        "came" in each is when."""
        heard = told = time.monotonic()
        found: dict[str, dict[str, Any]] = {}
        while (wanted := nodes.difference(found)) and self._text.keys() & self._selector.get_map().keys():
            now = time.monotonic()
            if now >= heard + patience:
                break
            if now >= told + _TELL_EVERY:
                told = now
                self._tell(wanted)
            for answer in self._read(min(heard + patience, told + _TELL_EVERY) - now):
                if answer["node"] in wanted:
                    heard = time.monotonic()
                if kind in answer and (not value or answer[kind] == value):
                    found[answer["node"]] = answer
        return list(found.values())

    def _tell(self, nodes: Iterable[str]) -> None:
        by_state: dict[str, list[str]] = {}
        for node in sorted(nodes):
            by_state.setdefault(self.at(node), []).append(node)
        waits = "; ".join(f"{compress_nodes(names)}: {state}" for state, names in by_state.items())
        print(f"hpcray doctor: waiting for {waits}", file=sys.stderr, flush=True)

    def leave(self, grace: float) -> str:
        """End the step: its input first, after `grace` seconds srun, which then kills the tasks.

        Returns:
            What it printed on stderr before it was told to end.
        """
        try:
            self._input.close()
        except BrokenPipeError:
            pass
        self._drain(grace)
        complaint = self._text[self._err].decode(errors="replace").strip()
        for end in (self._child.terminate, self._child.kill):
            try:
                self._child.wait(_LEAVE_TIME if self.over else 0.0)
                break
            except subprocess.TimeoutExpired:
                end()
                self._drain(_LEAVE_TIME)
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
        """Wait for output; the complete answers in it. Keeps in mind what the nodes are at."""
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
            self._at[answer["node"]] = answer.get("at") or self._at.get(answer["node"], _UNASKED)
        return [{**answer, "came": now} for answer in answers if answer]
