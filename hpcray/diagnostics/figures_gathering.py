"""The figures of many nodes, gathered down a tree of raylets and added up on the way back.

A question names the nodes. A raylet splits those that are not its own into at most `FANOUT` parts, asks the first
node of each part for that part, and adds up what comes back; so no raylet hears from more than `FANOUT` others,
however many there are. What has not come in time is reported as missing. Without a question nothing is sent or kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from hpcray.common.figures import FunctionRow, add_counts, add_functions, lower_bound, upper_bound
from hpcray.common.ids import raylet_of
from hpcray.core.effects import Send
from hpcray.protocol import messages as m

FANOUT = 32
FIGURES = "figures"
"""The question in `Introspect`, to a raylet and to a process."""
_LESS = 0.8
"""The share of its patience that a raylet leaves to those below it."""


def quantile(row: FunctionRow, share: float) -> float:
    """The run time in seconds below which this share of a function's runs is, to about a tenth; 0.0 without a run.

    It is the middle of a bucket, but never more than the sum of all times allows: of one run its time.
    """
    _, _, us, buckets = row
    total, seen = sum(buckets.values()), 0
    for bucket in sorted(buckets):
        seen += buckets[bucket]
        if seen >= share * total:
            if seen == buckets[bucket] == total:
                return float(us / total / 1e6)  # all are in one bucket: their mean is nearer than its middle
            longer = total - math.ceil(share * total) + 1  # so many runs take no less
            return float(min(math.sqrt(lower_bound(bucket) * upper_bound(bucket)), us / longer / 1e6))
    return 0.0


class FiguresReport(msgspec.Struct):
    """The figures of some nodes.

    Attributes:
        nodes: a row of each (`diagnostics.node_figures.NodeFigures.row`), packed: raylets pass rows on unread.
        functions: what has run there, by name. running, queued: tasks and calls that run and that wait, by name.
        elapsed: microseconds that those which run have run so far, by name.
        latency: seconds that a message took to a node and back, as its parent in the tree has measured them.
        missing: nodes that did not answer.
        partial: whether some runs were forgotten before the first question.
        held: seconds between the question and this answer.
    """

    nodes: list[msgspec.Raw] = []
    functions: dict[str, FunctionRow] = {}
    running: dict[str, int] = {}
    queued: dict[str, int] = {}
    elapsed: dict[str, int] = {}
    latency: dict[int, float] = {}
    missing: list[int] = []
    partial: bool = False
    held: float = 0.0

    def add(self, other: FiguresReport) -> None:
        """Take in the figures of further nodes."""
        self.nodes += other.nodes
        add_functions(self.functions, other.functions)
        add_counts(self.running, other.running)
        add_counts(self.queued, other.queued)
        add_counts(self.elapsed, other.elapsed)
        self.latency.update(other.latency)
        self.missing += other.missing
        self.partial = self.partial or other.partial


class _Gathering:
    """One question that is being answered. open: by number, the part that was asked and when."""

    def __init__(self, src: bytes, req: int, began: float, deadline: float) -> None:
        self.src, self.req, self.began, self.deadline = src, req, began, deadline
        self.report = FiguresReport()
        self.open: dict[int, tuple[list[int], float]] = {}
        self.own_open = False


class FiguresGathering:
    """The questions about nodes that one raylet answers.

    Args:
        node: its own.
    """

    def __init__(self, node: int) -> None:
        self._node = node
        self._number = 0
        self._gatherings: list[_Gathering] = []

    @property
    def waits_for_own(self) -> bool:
        """True while a question waits for this node's own figures (`own`)."""
        return any(one.own_open for one in self._gatherings)

    def ask(self, now: float, src: bytes, req: int, nodes: Sequence[int], patience: float) -> list[Send]:
        """Answer a question about these nodes within so many seconds."""
        one = _Gathering(src, req, now, now + patience)
        self._gatherings.append(one)
        one.own_open = self._node in nodes
        others = [node for node in nodes if node != self._node]
        size = -(-len(others) // FANOUT) or 1
        out: list[Send] = []
        for start in range(0, len(others), size):
            self._ask_part(now, one, others[start : start + size], out)
        return out + self._finish(now)

    def own(self, now: float, report: FiguresReport) -> list[Send]:
        """This node's own figures are there."""
        for one in self._gatherings:
            if one.own_open:
                one.own_open = False
                one.report.add(report)
        return self._finish(now)

    def answered(self, now: float, req: int, report: FiguresReport) -> list[Send]:
        """A node that was asked for a part has answered."""
        for one in self._gatherings:
            if req in one.open:
                part, sent = one.open.pop(req)
                report.latency[part[0]] = max(0.0, now - sent - report.held)
                one.report.add(report)
                return self._finish(now)
        return []

    def node_died(self, now: float, node: int) -> list[Send]:
        """A node is gone: the rest of its part is asked through another one."""
        out: list[Send] = []
        for one in self._gatherings:
            for number, (part, _) in list(one.open.items()):
                if part[0] == node:
                    del one.open[number]
                    one.report.missing.append(node)
                    if part[1:]:
                        self._ask_part(now, one, part[1:], out)
        return out + self._finish(now)

    def tick(self, now: float) -> list[Send]:
        """Answer what is due with what there is."""
        for one in self._gatherings:
            if now >= one.deadline:
                one.report.missing += [node for part, _ in one.open.values() for node in part]
                one.open.clear()
                if one.own_open:
                    one.report.missing.append(self._node)
                    one.own_open = False
        return self._finish(now)

    def _ask_part(self, now: float, one: _Gathering, part: list[int], out: list[Send]) -> None:
        self._number += 2  # even: the raylet numbers its own questions with the odd ones
        one.open[self._number] = (part, now)
        args = msgspec.msgpack.encode((part, _LESS * (one.deadline - now)))
        out.append(Send(raylet_of(part[0]), m.Introspect(self._number, FIGURES, args)))

    def _finish(self, now: float) -> list[Send]:
        """Answer the questions of which all parts are there."""
        done = [one for one in self._gatherings if not one.open and not one.own_open]
        out: list[Send] = []
        for one in done:
            self._gatherings.remove(one)
            one.report.held = now - one.began
            out.append(Send(one.src, m.GcsReply(one.req, True, msgspec.msgpack.encode(one.report))))
        return out
