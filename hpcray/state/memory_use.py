"""What takes the memory of a job: objects, by where they come from and how they grow, and processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcray.diagnostics.cluster_query import ClusterQuery
from hpcray.runtime.core_worker.core_worker import CoreWorker

_MOST_OBJECTS = 100_000
"""Objects that one process lists, at most."""


@dataclass
class ObjectCensus:
    """The objects that the processes of a job own.

    Attributes:
        origins: of each origin, how many there are and their bytes. An origin is the line that created the refs, where
            the job records them; else the function that returned the objects, or the process that has put them.
        partial: processes that own more objects than they have listed. missing: those that did not answer.
    """

    origins: dict[str, tuple[int, int]]
    partial: list[str]
    missing: list[str]


@dataclass(frozen=True)
class ObjectGrowth:
    """The objects of one origin: how many more there are than before, and how many more bytes; and now."""

    origin: str
    more: int
    more_bytes: int
    count: int
    size: int


def count_objects(process: CoreWorker, patience: float) -> ObjectCensus:
    """Count the objects of a job by where they come from.

    Args:
        process: it sends the questions. patience: seconds that a process may take to answer.
    """
    query = ClusterQuery(process, patience)
    people = {one.proc: one for one in query.processes() if one.kind in ("driver", "worker") and one.proc != process.me}
    answers = query.ask(people, "objects", _MOST_OBJECTS)
    found = ObjectCensus({}, [], [])
    for proc, one in people.items():
        answer = answers.get(proc)
        if answer is None:
            if proc not in query.gone:
                found.missing.append(one.title)
            continue
        for row in answer["rows"]:
            if row["mine"] and row["state"] in ("inline", "stored"):
                origin = row["site"] or row["task"] or f"put by {one.title}"
                count, size = found.origins.get(origin, (0, 0))
                found.origins[origin] = count + 1, size + row["size"]
        if answer["total"] > len(answer["rows"]):
            found.partial.append(one.title)
    return found


def growth(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> list[ObjectGrowth]:
    """Return what has changed from one count to the next, the largest growth first.

    Args:
        before, after: `ObjectCensus.origins`.
    """
    found = []
    for origin in {*before, *after}:
        (old, old_size), (new, new_size) = before.get(origin, (0, 0)), after.get(origin, (0, 0))
        if (old, old_size) != (new, new_size):
            found.append(ObjectGrowth(origin, new - old, new_size - old_size, new, new_size))
    return sorted(found, key=lambda one: (-one.more_bytes, -one.more, one.origin))


# ------------------------------------------------------------ process memory
# The processes of a job that take most memory, beside the object stores.


def largest_processes(process: CoreWorker, limit: int, timeout: float) -> list[dict[str, Any]]:
    """The processes with most resident memory but for the one that asks, the largest first.

    Args:
        limit: how many. timeout: seconds that a raylet or process may take.

    Returns:
        Rows "pid", "node", "what", "rss" (bytes) and "runs", the names of the tasks and calls that run there.
    """
    query = ClusterQuery(process, timeout)
    nodes = query.nodes()
    people = {one.proc: one for node in nodes for one in node.processes if one.proc != process.me}
    raylets = [one.proc for one in people.values() if one.kind == "raylet"]
    used = [row for rows in query.ask(raylets, "usage").values() for row in rows if row["proc"] in people]
    largest = sorted(used, key=lambda row: -int(row["rss"]))[:limit]
    calls = query.ask([row["proc"] for row in largest], "calls")
    return [
        {
            "pid": row["pid"],
            "node": people[row["proc"]].node,
            "what": people[row["proc"]].actor_class or people[row["proc"]].kind,
            "rss": row["rss"],
            "runs": [call["name"] for call in calls.get(row["proc"]) or ()],
        }
        for row in largest
    ]
