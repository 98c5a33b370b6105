"""Which nodes a question about single processes goes to: in a large job not all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcray.state.overview import NodeUse

MOST_PROCESSES = 512
"""Processes that one question asks, at most; one node is asked however many it has."""


@dataclass(frozen=True)
class NodeScope:
    """The nodes that are asked. note: says so where that is not all that was wanted, else ""."""

    nodes: tuple[int, ...]
    note: str = ""


def choose_nodes(nodes: Sequence[NodeUse], wanted: str, most: int = MOST_PROCESSES) -> NodeScope:
    """Choose the nodes to ask.

    Args:
        nodes: those of the job.
        wanted: those that the user has named: "0-3,7"; "" for all.
        most: processes.

    Raises:
        ValueError: `wanted` cannot be read.
    """
    named = parse_nodes(wanted)
    alive = [node for node in nodes if not node.problem and (named is None or node.index in named)]
    chosen: list[int] = []
    processes = 0
    for node in alive:
        processes += sum(node.workers.values()) + 1
        if chosen and processes > most:
            break
        chosen.append(node.index)
    if len(chosen) == len(alive):
        return NodeScope(tuple(chosen))
    shown = f"{len(chosen)} of {len(alive)} nodes ({chosen[0]} to {chosen[-1]})"
    return NodeScope(tuple(chosen), f"{shown}: there are more processes than are asked at once; name the nodes")


def parse_nodes(text: str) -> set[int] | None:
    """The indices in a text such as "0-3,7"; None for "".

    Raises:
        ValueError: this is no such text.
    """
    if not text.strip():
        return None
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(first) > 6 or len(last) > 6:
            raise ValueError(f"{text!r} names no nodes; hint: 0-3,7")
        found.update(range(int(first), int(last or first) + 1))
    return found
