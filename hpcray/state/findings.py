"""One line of the doctor's report, and many nodes' lines as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OK = "ok"
NOTE = "note"
WARN = "warn"
FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        topic: what it belongs to: "MPI", "UCX", ...
        name: what was looked at.
        value: what was found.
        level: OK (green), NOTE (a fact), WARN (yellow: works, but not well) or FAIL (red: a job on several nodes will
            not start).
        hint: what to do, or "".
    """

    topic: str
    name: str
    value: str
    level: str = NOTE
    hint: str = ""


@dataclass(frozen=True)
class Row:
    """A finding, and the nodes that have it.

    Attributes:
        finding: what they have.
        nodes: their names; empty: the finding is of the whole job, or of the only machine.
    """

    finding: Finding
    nodes: tuple[str, ...] = ()


def merge(reports: Mapping[str, Sequence[Finding]]) -> list[Row]:
    """The rows of several nodes: equal findings once, in the order of the first node's report.

    Args:
        reports: findings by name of node.
    """
    order: dict[tuple[str, str], int] = {}
    topics: dict[str, int] = {}
    found: dict[Finding, list[str]] = {}
    for node, findings in reports.items():
        for finding in findings:
            topics.setdefault(finding.topic, len(topics))
            order.setdefault((finding.topic, finding.name), len(order))
            found.setdefault(finding, []).append(node)
    rows = [Row(finding, tuple(nodes)) for finding, nodes in found.items()]
    return sorted(rows, key=lambda row: (topics[row.finding.topic], order[row.finding.topic, row.finding.name]))
