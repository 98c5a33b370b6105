"""A sample of a job as one row, whatever the number of its nodes; and the rows of its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcray.common.figures import add_counts
from hpcray.state.overview import FunctionUse, JobUse, NodeUse

_MOST_PROBLEMS = 20
_SUMMED = ("cores", "rss", "spilling", "restoring", "pulling", "pushing", "actors", "waiting")


def totals(use: JobUse) -> dict[str, Any]:
    """Return a sample of the job as one row: amounts added up, shares averaged, what hosts share counted once."""
    nodes = [node for node in use.nodes if not node.problem]
    found: dict[str, Any] = {name: sum(getattr(node, name) for node in nodes) for name in _SUMMED}
    workers: dict[str, int] = {}
    for node in nodes:
        add_counts(workers, node.workers)
    hosts = list({node.host: node for node in nodes}.values())
    # Two nodes of a host, or of a container, have the same memory, unless each has a limit of its own.
    limits = list({(node.host, node.memory[1]): node for node in nodes}.values())
    cpus = sum(node.cpu_count for node in hosts)
    return found | {
        "time": use.time,
        "cpu": sum(node.cpu * node.cpu_count for node in hosts) / cpus if cpus else 0.0,
        "cpu_count": cpus,
        "memory_used": sum(node.memory[0] for node in limits),
        "memory_limit": sum(node.memory[1] for node in limits),
        "receiving": sum(node.receiving for node in hosts),
        "sending": sum(node.sending for node in hosts),
        "store_used": sum(node.store["used"] for node in nodes),
        "store_capacity": sum(node.store["capacity"] for node in nodes),
        "on_disk": sum(node.store["on_disk"] for node in nodes),
        "objects": sum(node.store["objects"] for node in nodes),
        **_gpu_use([gpu for node in nodes for gpu in node.gpus]),
        "workers": workers,
        "resources": _resources(nodes),
        **{name: sum(getattr(one, name) for one in use.functions) for name in ("running", "queued", "ended", "failed")},
        "rate": sum(one.rate for one in use.functions),
    }


def node_states(nodes: Sequence[NodeUse]) -> dict[str, Any]:
    """How many nodes are alive, silent and dead, and what is wrong with the first of those that are not alive."""
    wrong = [node for node in nodes if node.problem]
    dead = sum(1 for node in wrong if node.problem.startswith("dead"))
    rows = [{"node": node.index, "host": node.host, "problem": node.problem} for node in wrong[:_MOST_PROBLEMS]]
    return {"alive": len(nodes) - len(wrong), "silent": len(wrong) - dead, "dead": dead, "problems": rows}


def node_row(node: NodeUse) -> dict[str, Any]:
    """A row of the table of nodes."""
    return {
        "node": node.index,
        "host": node.host,
        "id": node.node_id,
        "state": node.problem or "alive",
        "cpu": node.cpu,
        "cpu_count": node.cpu_count,
        "cores": node.cores,
        "memory_used": node.memory[0],
        "memory_limit": node.memory[1],
        "memory": node.memory[0] / node.memory[1] if node.memory[1] else 0.0,
        "rss": node.rss,
        "store_used": node.store.get("used", 0),
        "store_capacity": node.store.get("capacity", 0),
        "on_disk": node.store.get("on_disk", 0),
        "spilling": node.spilling,
        "restoring": node.restoring,
        "receiving": node.receiving,
        "sending": node.sending,
        "pulling": node.pulling,
        "pushing": node.pushing,
        "slowness": node.slowness,
        **_gpu_use(node.gpus),
        "workers": sum(node.workers.values()),
        "busy": node.workers.get("busy", 0),
        "actors": node.actors,
        "waiting": node.waiting,
        "latency": node.latency,
    }


def function_row(one: FunctionUse, whole: float) -> dict[str, Any]:
    """A row of the table of functions. whole: run time of all functions in seconds."""
    return {
        "name": one.name,
        "running": one.running,
        "queued": one.queued,
        "ended": one.ended,
        "failed": one.failed,
        "rate": one.rate,
        "seconds": one.total,
        "share": one.total / whole if whole else 0.0,
        "p50": one.p50,
        "p99": one.p99,
    }


def _gpu_use(gpus: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The GPUs' number, their average share of time in use (None without one), and their memory in bytes."""
    return {
        "gpus": len(gpus),
        "gpu": sum(gpu["busy"] for gpu in gpus) / len(gpus) if gpus else None,
        "gpu_used": sum(gpu["used"] for gpu in gpus),
        "gpu_total": sum(gpu["total"] for gpu in gpus),
    }


def _resources(nodes: Sequence[NodeUse]) -> dict[str, list[float]]:
    """Return of each resource the used and the total amount, but for those of one node and the store's."""
    found: dict[str, list[float]] = {}
    for node in nodes:
        for name, (used, total) in node.resources.items():
            if not name.startswith("node:") and name != "object_store_memory":
                row = found.setdefault(name, [0.0, 0.0])
                row[0] += used
                row[1] += total
    return found
