"""The doctor on every node of an allocation: one step, and a talk with its tasks over srun's stdin and stdout."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcray.state.findings import Finding
from hpcray.state.node_report import MARK

_START_TIME = 60.0
_REPORT_TIME = 150.0
_PING_TIME = 5.0
_PINGS = 5
_LEAVE_TIME = 10.0


@dataclass
class NodesSaid:
    """What the nodes answered.

    Attributes:
        reports: findings by node.
        offsets: by node, how much its clock is ahead of ours, and how uncertain that is, both in seconds.
        missing: nodes that did not answer.
        complaint: what srun printed on stderr.
    """

    reports: dict[str, list[Finding]] = field(default_factory=dict)
    offsets: dict[str, tuple[float, float]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    complaint: str = ""


def ask_nodes(line: Sequence[str], nodes: Sequence[str]) -> NodesSaid:
    """Run `line` (srun and the node_report module) and ask every node for its findings and its time.

    Returns:
        What came within the time; nothing of the step is left.
    """
    said = NodesSaid()
    try:
        step = _Step(line)
    except OSError as error:
        return NodesSaid(missing=list(nodes), complaint=f"{line[0]}: {error.strerror}")
    expected = set(nodes)
    try:
        came = {answer["node"] for answer in step.collect(expected, "hello", _START_TIME)}
        for turn in range(_PINGS if came else 0):
            _ping(step, came, str(turn), said)
        if came:
            step.say("report")
            for answer in step.collect(came, "findings", _REPORT_TIME):
                said.reports[answer["node"]] = [Finding(**finding) for finding in answer["findings"]]
    finally:
        said.complaint = step.leave()
    said.reports = {node: said.reports[node] for node in nodes if node in said.reports}
    said.missing = [node for node in nodes if node not in said.reports]
    return said


def _ping(step: _Step, nodes: set[str], turn: str, said: NodesSaid) -> None:
    """One round: the answer with the shortest way there and back is the surest."""
    sent = time.time()
    step.say(f"ping {turn}")
    for answer in step.collect(nodes, "pong", _PING_TIME, turn):
        half = (answer["came"] - sent) / 2
        offset = (answer["time"] - sent - half, half)
        best = said.offsets.get(answer["node"])
        if best is None or half < best[1]:
            said.offsets[answer["node"]] = offset


class _Step:
    """The running step."""

    def __init__(self, line: Sequence[str]) -> None:
        self._child = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self._child.stdin is not None and self._child.stdout is not None and self._child.stderr is not None
        self._input = self._child.stdin
        self._selector = selectors.DefaultSelector()
        self._text = {self._child.stdout.fileno(): b"", self._child.stderr.fileno(): b""}
        self._out, self._err = self._text
        for fd in self._text:
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ)

    def say(self, text: str) -> None:
        """A line to every task."""
        try:
            self._input.write(text.encode() + b"\n")
            self._input.flush()
        except BrokenPipeError:
            pass  # it has ended; nobody will answer

    def collect(self, nodes: set[str], kind: str, timeout: float, value: str = "") -> list[dict[str, Any]]:
        """Answers of this kind, one from each node, as far as they come; "came" in each is when."""
        deadline = time.monotonic() + timeout
        found: dict[str, dict[str, Any]] = {}
        while set(found) < nodes and self._text.keys() & self._selector.get_map().keys():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for answer in self._read(left):
                if kind in answer and (not value or answer[kind] == value):
                    found[answer["node"]] = answer
        return list(found.values())

    def leave(self) -> str:
        """End the step; what it printed on stderr."""
        try:
            self._input.close()
        except BrokenPipeError:
            pass
        try:
            self._drain(time.monotonic() + _LEAVE_TIME)
            self._child.wait(_LEAVE_TIME)
        except subprocess.TimeoutExpired:
            self._child.terminate()
            try:
                self._child.wait(_LEAVE_TIME)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        self._selector.close()
        for stream in (self._child.stdout, self._child.stderr):
            if stream is not None:
                stream.close()
        return self._text[self._err].decode(errors="replace").strip()

    def _drain(self, deadline: float) -> None:
        while self._selector.get_map() and time.monotonic() < deadline:
            self._read(deadline - time.monotonic())

    def _read(self, timeout: float) -> list[dict[str, Any]]:
        """Wait for output; the complete answers in it."""
        for key, _ in self._selector.select(max(0.0, timeout)):
            more = os.read(key.fd, 65536)
            if more:
                self._text[key.fd] += more
            else:
                self._selector.unregister(key.fd)
        now = time.time()
        *lines, self._text[self._out] = self._text[self._out].split(b"\n")
        return [{**answer, "came": now} for line in lines if (answer := _parse(line.decode(errors="replace")))]


def _parse(line: str) -> dict[str, Any]:
    """The answer in a line; {} where there is none."""
    _, mark, text = line.partition(MARK)
    try:
        answer = json.loads(text) if mark else {}
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) and "node" in answer else {}
