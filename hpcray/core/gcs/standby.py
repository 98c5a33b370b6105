"""Which raylet becomes the head when the present one dies."""

from __future__ import annotations

from collections.abc import Container, Iterable

from hpcray.protocol.messages import NodeInfo

NO_NODE = -1
"""In place of a node: there is none."""


def choose_standby(
    living: Iterable[NodeInfo], head: int, driver_rank: int, leaving: Container[int] = (), present: int = NO_NODE
) -> int:
    """The node whose raylet gets the head's tables, and takes over when the head dies; NO_NODE where there is none.

    Where a program runs, its node, and no other: the job ends with that node in any case. Without a program, a node of
    another world than the head's, as the nodes of one world often end together; the one that was there first. The
    present one stays, unless it is about to leave or is of the head's world, and another is not.

    Args:
        living: all living nodes that have connected, the head among them.
        driver_rank: the node of the program; NO_NODE in a job without one.
        leaving: nodes that are about to leave.
        present: the standby so far.
    """
    found = {info.index: info for info in living}
    world = found.pop(head).world
    if driver_rank != NO_NODE:
        return driver_rank if driver_rank in found else NO_NODE
    ranked = (
        (info.index in leaving, info.world == world, info.index != present, info.index) for info in found.values()
    )
    return min(ranked, default=(False, False, False, NO_NODE))[3]


def is_majority(count: int, living: int) -> bool:
    """Return True if so many nodes of those that were alive last can go on as the job; the others then do not."""
    return 2 * count > living
