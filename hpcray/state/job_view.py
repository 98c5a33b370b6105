"""The rows of `hpcray top`: samples of the whole job, and details of a node, a process and the actors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from hpcray.common.ids import node_of, raylet_of
from hpcray.common.job_names import parse_worker_log_name
from hpcray.diagnostics.cluster_query import ClusterQuery, ClusterRoster, stacks
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.state.overview import JobOverview, JobUse
from hpcray.state.reports import show_stacks

_QUERY_TIMEOUT = 2.0
_TAIL = 50  # lines


class JobSource(Protocol):
    """Where a view of a job gets its rows from. Every call may take seconds, and raise ConnectionError."""

    @property
    def ended(self) -> str:
        """Why there is nothing more to ask: the job, or the node that is asked, is gone; "" while it is there."""

    def sample(self) -> JobUse:
        """All nodes and functions."""

    def functions_of(self, node: int) -> JobUse:
        """One node and what has run there."""

    def processes(self, node: int) -> list[dict[str, Any]]:
        """The processes of a node."""

    def actors(self) -> list[dict[str, Any]]:
        """All actors; of dead ones when and why they ended."""

    def stack(self, node: int, proc: bytes) -> list[str]:
        """The stacks of a process."""

    def transfers(self) -> list[dict[str, Any]]:
        """The transfers of objects between nodes that are under way, or wait for their turn."""

    def tail(self, node: int) -> list[tuple[str, str]]:
        """The last lines of workers of a node: (pid, line)."""


class LiveJob:
    """The job of a process that is in it.

    Args:
        process: it sends the questions.
    """

    def __init__(self, process: CoreWorker) -> None:
        self._process = process
        self._overview = JobOverview(process)
        self._of_node: dict[int, JobOverview] = {}
        self._query = ClusterQuery(process, _QUERY_TIMEOUT)

    @property
    def ended(self) -> str:
        """See `JobSource`."""
        return self._process.dead or ""

    def sample(self) -> JobUse:
        """See `JobSource`."""
        return self._overview.sample()

    def functions_of(self, node: int) -> JobUse:
        """See `JobSource`."""
        overview = self._of_node.get(node)
        if overview is None:
            overview = self._of_node[node] = JobOverview(self._process)
        return overview.sample([node])

    def processes(self, node: int) -> list[dict[str, Any]]:
        """See `JobSource`."""
        return self._overview.processes(node)

    def nodes(self) -> list[ClusterRoster]:
        """Every node, dead ones too, and who is on it."""
        return self._query.nodes()

    def actors(self) -> list[dict[str, Any]]:
        """See `JobSource`. Rows "actor", "class", "name", "state", "node", "pid", "proc", "restarts", "reason",
        "ended"."""
        return self.actors_on(self.nodes())

    def actors_on(self, nodes: Sequence[ClusterRoster]) -> list[dict[str, Any]]:
        """The same, where the nodes have been asked already."""
        now = time.time()
        ended = {row["actor"]: row["seconds"] for node in nodes for row in node.ended if row["actor"]}
        pids = {one.proc: one.pid for node in nodes for one in node.processes}
        return [
            {
                "actor": row["actor"].hex(),
                "class": row["class_name"],
                "name": row["name"] or "",
                "state": row["state"],
                "node": row["node"],
                "pid": pids.get(row["worker"], 0) or row["pid"] or 0,
                "proc": (row["worker"] or b"").hex(),
                "restarts": row["restarts"],
                "reason": row["reason"] or "",
                "ended": None if dead_for is None or row["state"] != "DEAD" else now - dead_for,
            }
            for row in self._process.gcs.call("actors")
            for dead_for in [row["dead_for"] if row["dead_for"] is not None else ended.get(row["actor"])]
        ]

    def stack(self, node: int, proc: bytes) -> list[str]:
        """See `JobSource`."""
        return list(show_stacks(stacks(self._query, [node], proc), False))

    def transfers(self) -> list[dict[str, Any]]:
        """See `JobSource`. Rows "object", "size", "done", "from", "to" (nodes; -1: not known yet), "state"; a transfer
        that both ends list is one row, the receiver's."""
        alive = [raylet_of(row["Index"]) for row in self._process.gcs.nodes() if row["Alive"]]
        found: dict[tuple[bytes, int], dict[str, Any]] = {}
        for raylet, rows in self._query.ask(alive, "transfers").items():
            here = node_of(raylet)
            for row in rows:
                sends = row["state"] == "sends"
                ends = (here, row["node"]) if sends else (row["node"], here)
                key = row["id"], ends[1]
                if not sends or key not in found:
                    found[key] = {
                        "object": row["id"].hex(), "size": row["size"], "done": row["done"], "from": ends[0],
                        "to": ends[1], "state": row["state"],
                    }  # fmt: skip
        return sorted(found.values(), key=lambda row: (row["done"] - row["size"], row["object"]))

    def tail(self, node: int) -> list[tuple[str, str]]:
        """See `JobSource`."""
        raylet = raylet_of(node)
        rows = self._query.ask([raylet], "log_tail", _TAIL).get(raylet, [])
        found = []
        for name, _, line in rows:
            parsed = parse_worker_log_name(name)
            found.append((str(parsed[1]) if parsed else name, line))
        return found
