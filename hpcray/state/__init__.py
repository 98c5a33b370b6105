"""Observation of a running job, from outside or from within."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcray.diagnostics.cluster_query import ClusterRoster, ProcessInfo
    from hpcray.runtime.core_worker.core_worker import CoreWorker

# Commands that ask without joining a job load none of the modules that are imported in the functions below.

_TIMELINE_TIMEOUT = 30.0  # seconds that a worker may take to answer
_MICRO = 1e6


@contextlib.contextmanager
def attached(address: str = "auto") -> Iterator[CoreWorker]:
    """Join the job that runs on this machine, and leave it at the end; in a program of the job, use its process.

    Args:
        address: "auto" (the only job of this user on this machine), or the session directory of one of its nodes.

    Raises:
        ConnectionError: there is no such job. ValueError: the address is not valid.
    """
    from hpcray.runtime.core_worker.core_worker import current

    with connected(address) as process:
        current.process = process
        yield process


@contextlib.contextmanager
def connected(address: str) -> Iterator[CoreWorker]:
    """Join a job as `attached` does, but not for what the program calls meanwhile."""
    from hpcray.diagnostics.introspection import ObjectInventory
    from hpcray.processes.bootstrap import enter
    from hpcray.processes.features import FEATURES
    from hpcray.runtime.core_worker.core_worker import connect, current
    from hpcray.runtime.node.options import NodeOptions

    if current.process is not None and current.process.dead is None:
        yield current.process
        return
    process = connect(enter(address, NodeOptions()).session_dir, "attached", ObjectInventory, FEATURES)
    try:
        process.start()
        yield process
    finally:
        process.close()


def timeline(filename: str | None = None, *, address: str | None = None) -> list[dict[str, Any]] | None:
    """The tasks and calls that living workers remember, those that run included, in Chrome's trace format.

    Each worker remembers its last `task_events` ones (a setting, 5,000 by default).

    Args:
        filename: the JSON file to write; None: return the events.
        address: as `hpcray.init`'s; None: the job of this program.

    Returns:
        The events, or None when they were written to a file. Times are microseconds since 1970, by each node's clock.
    """
    from hpcray.diagnostics.cluster_query import ClusterQuery

    with attached(address or "auto") as process:
        diagnosis = ClusterQuery(process, _TIMELINE_TIMEOUT)
        nodes = diagnosis.nodes()
        workers = {one.proc: one for node in nodes for one in node.processes if one.kind == "worker" and one.pid}
        answers = diagnosis.ask(workers, "events")
    events: list[dict[str, Any]] = []
    by_index = {node.index: node for node in nodes}
    for proc, answer in answers.items():
        events += _worker_events(workers[proc], by_index[workers[proc].node], answer)
    if filename is None:
        return events
    with open(filename, "w") as file:
        json.dump(events, file)
    return None


def _worker_events(one: ProcessInfo, node: ClusterRoster, answer: dict[str, Any]) -> list[dict[str, Any]]:
    pid = f"Node {node.index} ({node.host})"
    spans = [
        (end - us / _MICRO, us, name, task, {"failed": failed} if failed else {})
        for task, name, end, us, failed in answer["ended"]
    ]
    spans += [
        (answer["now"] - call["seconds"], int(call["seconds"] * _MICRO), call["name"], call["task"], {"running": True})
        for call in answer["running"]
    ]
    spans.sort(key=lambda span: span[:2])
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": pid}}]
    lanes: list[float] = []
    for start, us, name, task, more in spans:
        lane = next((row for row, end in enumerate(lanes) if end <= start), len(lanes))  # concurrent calls: own rows
        lanes[lane : lane + 1] = [start + us / _MICRO]
        events.append({
            "cat": f"task::{name}", "name": name, "ph": "X", "pid": pid,
            "tid": f"worker {one.proc.hex()} (pid {one.pid})" + (f" #{lane + 1}" if lane else ""),
            "ts": (start + answer["offset"]) * _MICRO,
            "dur": us,
            "cname": "terrible" if more.get("failed") else "generic_work",
            "args": {"task_id": task.hex(), "worker_id": one.proc.hex(), "pid": one.pid, **more},
        })  # fmt: skip
    return events
