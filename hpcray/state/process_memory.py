"""The processes of a job that take most memory, beside the object stores."""

from __future__ import annotations

from typing import Any

from hpcray.diagnostics.cluster_query import ClusterQuery
from hpcray.runtime.core_worker.core_worker import CoreWorker


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
