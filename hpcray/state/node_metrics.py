"""The figures of a node as metrics: with Ray's names, labels and units where Ray has them, else with our own."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from hpcray.common.figures import upper_bound
from hpcray.diagnostics.metrics_endpoint import (
    COUNTER,
    GAUGE,
    HISTOGRAM,
    METRICS_SOCKET,
    MetricRow,
    MetricsEndpoint,
    metrics_text,
    read_metrics,
)
from hpcray.platform.private_files import write_private_file
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.state.overview import FunctionUse, JobOverview, NodeUse

_PATIENCE = 1.0
_GPU_TIME = 0.8  # seconds
_MEGA = 1e6
_PERCENT = 100.0
_DURATIONS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)  # seconds
_ALMOST = 1 + 1e-9  # bounds of buckets are powers of ten, but for rounding
_WORKER_STATES = ("starting", "idle", "busy", "leaving")


class _Last:
    """The overview of which samples are taken, so that there are rates: one per process that asks."""

    overview: JobOverview | None = None
    process: CoreWorker | None = None


def common_labels(process: CoreWorker) -> dict[str, str]:
    """The labels of every sample."""
    return {"NodeId": process.place.node_id, "SessionName": f"session_{process.place.job_id}"}


def own_metrics(process: CoreWorker) -> list[MetricRow]:
    """The figures of the node of this process; none if its raylet does not answer."""
    overview = _Last.overview
    first = overview is None or _Last.process is not process
    if overview is None or first:
        overview = _Last.overview = JobOverview(process, _PATIENCE)
        _Last.process = process
    try:
        use = overview.sample([process.node])
        if first and any(one.resources.get("GPU", (0.0, 0.0))[1] and not one.gpus for one in use.nodes):
            time.sleep(_GPU_TIME)  # the first question has only begun to look at the GPUs
            use = overview.sample([process.node])
    except (ConnectionError, RuntimeError, ValueError):
        return []
    return [row for node in use.nodes if not node.problem for row in metric_rows(node, use.functions)]


def metric_rows(node: NodeUse, functions: list[FunctionUse]) -> list[MetricRow]:
    """The figures of a node, and of what its processes run and wait for.

    Args:
        node: the node.
        functions: those of this node alone.
    """
    store, host = node.store, {"ip": node.host}
    used, limit = node.memory
    rows = [
        _gauge("node_cpu_utilization", "Busy CPUs of the host, in percent", _PERCENT * node.cpu, host),
        _gauge("node_cpu_count", "CPUs of the host", node.cpu_count, host),
        _gauge("node_job_cpus", "CPUs that the processes of the job use on this node", node.cores, host),
        _gauge("node_mem_used", "Memory in use, in bytes, of what is nearest to its limit", used, host),
        _gauge("node_mem_total", "The limit of that memory, in bytes", limit, host),
        _gauge("node_job_rss", "Resident bytes of the processes of the job on this node", node.rss, host),
        _gauge("node_network_received", "Bytes that the host has received", node.row["network"]["received"], host),
        _gauge("node_network_sent", "Bytes that the host has sent", node.row["network"]["sent"], host),
        _gauge("object_store_available_memory", "Free bytes of the object store", store["capacity"] - store["used"]),
        _gauge("object_store_used_memory", "Bytes of the object store in use", store["used"]),
        _gauge("object_store_num_local_objects", "Objects on this node", store["objects"]),
        _gauge("object_store_waiting", "Objects that wait for room in the store", store["waiting"]),
        _labelled(
            "object_store_memory", "Bytes of objects by place", "Location",
            {"MMAP_SHM": store["used"], "SPILLED": store["on_disk"]},
        ),
        _labelled(
            "spill_manager_objects_bytes", "Bytes written to disk and read back", "State",
            {"Spilled": store["spilled_bytes"], "Restored": store["loaded_bytes"]},
        ),
        _labelled(
            "object_transfers", "Transfers of objects that have ended well", "State",
            {"Pulled": store["pulled"], "Sent": store["sent"]}, COUNTER,
        ),
        _labelled(
            "object_transfer_bytes", "Bytes of objects that came from other nodes, and that went there", "State",
            {"Pulled": store["pulled_bytes"], "Sent": store["sent_bytes"]}, COUNTER,
        ),
        *_wire_rows(node),
        {
            **_row("resources", "Resources of this node, logical", GAUGE),
            "samples": [
                [[["Name", name], ["State", state]], amount]
                for name, (taken, total) in sorted(node.resources.items())
                for state, amount in (("USED", taken), ("AVAILABLE", max(0.0, total - taken)))
            ],
        },
        _labelled(
            "node_workers", "Worker processes", "State",
            {state: node.workers.get(state, 0) for state in _WORKER_STATES},
        ),
        _labelled("actors", "Actors that have a process on this node", "State", {"ALIVE": node.actors}),
        _gauge("waiting_leases", "Workers that tasks wait for on this node", node.waiting),
        *_gpu_rows(node),
        *_core_time_rows(node),
        *_task_rows(functions),
    ]  # fmt: skip
    if node.latency is not None:
        rows.append(_gauge("node_message_round_trip_seconds", "A control message to this node and back", node.latency))
    return rows


def _wire_rows(node: NodeUse) -> list[MetricRow]:
    """The rows of the wires between raylets: messages on the control wire, objects on that of objects."""
    wire, store = node.row["wire"], node.store
    sent, received = wire["sent"], wire["received"]
    wires = {
        "control": (("Sent", *sent), ("Received", *received)),
        "objects": (("Sent", store["sent"], store["sent_bytes"]), ("Received", store["pulled"], store["pulled_bytes"])),
    }
    rows = [
        _row(
            "wire_messages", "Messages to and from other nodes; on the wire of objects a message is an object", COUNTER
        ),
        _row("wire_bytes", "Their bytes", COUNTER),
    ]
    for row in rows:
        row["samples"] = []
    for name, figures in wires.items():
        for state, *amounts in figures:
            for row, amount in zip(rows, amounts, strict=True):
                row["samples"].append([[["Wire", name], ["State", state]], amount])
    return rows


def _core_time_rows(node: NodeUse) -> list[MetricRow]:
    """The account of core time; nothing where the job keeps no history."""
    texts = {
        "core_time": "Seconds of core time since the start, by what the cores did; they add up to cores times seconds",
        "cpu_time_beside": "Seconds of CPU time that are in none of these, by whose they are",
    }
    return [
        _labelled(f"{name}_seconds", text, "State", node.row[name]) for name, text in texts.items() if name in node.row
    ]


def _gpu_rows(node: NodeUse) -> list[MetricRow]:
    if not node.gpus:
        return []
    figures = (
        ("node_gpus_utilization", "Use of each GPU, in percent", [_PERCENT * gpu["busy"] for gpu in node.gpus]),
        ("node_gram_used", "Memory of each GPU in use, in MB", [gpu["used"] / _MEGA for gpu in node.gpus]),
        ("node_gram_available", "Free memory, in MB", [(gpu["total"] - gpu["used"]) / _MEGA for gpu in node.gpus]),
    )
    labels = [[["GpuDeviceName", gpu["name"]], ["GpuIndex", str(gpu["index"])]] for gpu in node.gpus]
    return [
        {**_row(name, text, GAUGE), "samples": [list(pair) for pair in zip(labels, values, strict=True)]}
        for name, text, values in figures
    ]


def _task_rows(functions: list[FunctionUse]) -> list[MetricRow]:
    tasks = {**_row("tasks", "Tasks and calls by function and state", GAUGE), "samples": []}
    times = {**_row("task_duration_seconds", "Run times of tasks and calls", HISTOGRAM), "samples": []}
    times["boundaries"] = list(_DURATIONS)
    for one in functions:
        counts = {
            "RUNNING": one.running, "PENDING_NODE_ASSIGNMENT": one.queued, "FINISHED": one.ended - one.failed,
            "FAILED": one.failed,
        }  # fmt: skip
        tasks["samples"] += [[[["Name", one.name], ["State", state]], count] for state, count in counts.items()]
        if one.ended:
            times["samples"].append([[["Name", one.name]], [*_counts(one.buckets), one.seconds]])
    return [tasks, times]


def _counts(buckets: Mapping[int, int]) -> list[int]:
    found = [0] * (len(_DURATIONS) + 1)
    for bucket, runs in buckets.items():
        bound = upper_bound(bucket)
        place = next((place for place, most in enumerate(_DURATIONS) if bound <= most * _ALMOST), len(_DURATIONS))
        found[place] += runs
    return found


def _row(name: str, text: str, kind: str) -> MetricRow:
    return {"name": name, "kind": kind, "help": text, "boundaries": []}


def _gauge(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> MetricRow:
    return {**_row(name, text, GAUGE), "samples": [[[list(pair) for pair in (labels or {}).items()], value]]}


def _labelled(name: str, text: str, label: str, values: Mapping[str, Any], kind: str = GAUGE) -> MetricRow:
    return {**_row(name, text, kind), "samples": [[[[label, key]], value] for key, value in values.items()]}


# ------------------------------------------------------------ metrics export
# The process that exports the metrics of one node for as long as its job runs.


_PERIOD = 0.5
"""Seconds between two looks whether the job runs, and whether a process serves."""
_MODE = 0o644
"""The mode of the text file: a collector is another user."""


def export_metrics(process: CoreWorker, directory: Path | None, interval: float) -> None:
    """Serve the metrics of the node of this process on its socket, and write them to a file, until the job ends.

    SIGTERM and Ctrl-C end it too; the file is removed at the end.

    Args:
        directory: of the file, `hpcray-<session>-<node>.prom`; None: there is none.
        interval: seconds between two versions of the file.

    Raises:
        OSError: the directory is not writable.
    """
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    name = f"hpcray-{os.path.basename(process.place.session_dir)}-{process.node}.prom"
    path = directory / name if directory is not None else None
    place, labels = process.place.session_dir, common_labels(process)
    endpoint = MetricsEndpoint(place, labels, lambda: None, partial(own_metrics, process))
    since_written, was_written, problem = interval, False, ""
    try:
        while process.dead is None:
            with contextlib.suppress(OSError):  # the session directory is gone: the job has ended
                endpoint.try_to_serve(make=True)
            if path is not None and since_written >= interval:
                try:
                    _write(path, _text(process))
                    was_written, problem = True, ""
                except OSError as error:  # once it could be written, a full disk is one that has room again
                    if not was_written:
                        raise
                    if not problem:
                        problem = f"{path} is not written: {error.strerror}; it will be, when that works again"
                        print(f"hpcray: {problem}", file=sys.stderr, flush=True)
                since_written = 0.0
            if ended.wait(min(_PERIOD, interval)):
                break
            since_written += min(_PERIOD, interval)
    finally:
        endpoint.close()
        if path is not None:
            path.unlink(missing_ok=True)


def _text(process: CoreWorker) -> str:
    """All metrics of the node: from the process that serves them, else the node's own."""
    with contextlib.suppress(OSError):
        if os.path.exists(os.path.join(process.place.session_dir, METRICS_SOCKET)):
            return read_metrics(process.place.session_dir)
    return metrics_text(own_metrics(process), common_labels(process))[0]


def _write(path: Path, text: str) -> None:
    """A collector sees the old file or the new one, whole."""
    write_private_file(str(path), text.encode(), mode=_MODE)
