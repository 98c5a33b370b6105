"""When which worker ran which task: a trace for chrome://tracing or https://ui.perfetto.dev."""

from __future__ import annotations

import json
from typing import Any

from hpcray.runtime.diagnosis import Diagnosis, NodeRoll, Someone
from hpcray.state.attach import attached

_PATIENCE = 30.0
_MICRO = 1e6


def timeline(filename: str | None = None, *, address: str | None = None) -> list[dict[str, Any]] | None:
    """The tasks and calls that living workers remember, those that run included, in Chrome's trace format.

    Each worker remembers its last `task_events` ones (a setting, 5,000 by default).

    Args:
        filename: the JSON file to write; None: the events are returned.
        address: as `hpcray.init`'s; None: the job of this program.

    Returns:
        The events, or None when they were written to a file. Times are microseconds since 1970, by each node's clock.
    """
    with attached(address or "auto") as process:
        diagnosis = Diagnosis(process, _PATIENCE)
        nodes = diagnosis.roll()
        workers = {one.proc: one for node in nodes for one in node.people if one.kind == "worker" and one.pid}
        told = diagnosis.ask(workers, "events")
    events: list[dict[str, Any]] = []
    by_index = {node.index: node for node in nodes}
    for proc, answer in told.items():
        events += _worker_events(workers[proc], by_index[workers[proc].node], answer)
    if filename is None:
        return events
    with open(filename, "w") as file:
        json.dump(events, file)
    return None


def _worker_events(one: Someone, node: NodeRoll, told: dict[str, Any]) -> list[dict[str, Any]]:
    pid = f"Node {node.index} ({node.host})"
    spans = [
        (end - us / _MICRO, us, name, task, {"failed": failed} if failed else {})
        for task, name, end, us, failed in told["ended"]
    ]
    spans += [
        (told["now"] - call["seconds"], int(call["seconds"] * _MICRO), call["name"], call["task"], {"running": True})
        for call in told["running"]
    ]
    spans.sort(key=lambda span: span[:2])
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": pid}}]
    lanes: list[float] = []
    for start, us, name, task, more in spans:
        lane = _lane(lanes, start)
        lanes[lane] = start + us / _MICRO
        events.append({
            "cat": f"task::{name}",
            "name": name,
            "ph": "X",
            "pid": pid,
            "tid": _thread(one, lane),
            "ts": (start + told["offset"]) * _MICRO,
            "dur": us,
            "cname": "terrible" if more.get("failed") else "generic_work",
            "args": {"task_id": task.hex(), "worker_id": one.proc.hex(), "pid": one.pid, **more},
        })  # fmt: skip
    return events


def _lane(lanes: list[float], start: float) -> int:
    """Calls of one worker that ran side by side are shown one below the other."""
    for place, end in enumerate(lanes):
        if end <= start:
            return place
    lanes.append(0.0)
    return len(lanes) - 1


def _thread(one: Someone, lane: int) -> str:
    return f"worker {one.proc.hex()} (pid {one.pid})" + (f" #{lane + 1}" if lane else "")
