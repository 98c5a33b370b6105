"""The figures of this node for `hpcray top`, `hpcray metrics` and `hpcray status`; gathered on request."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from hpcray.common.figures import FunctionRow, add_counts, add_functions
from hpcray.core.effects import Send
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.core.raylet.local_lease_manager import LocalLeaseManager
from hpcray.diagnostics.figures_gathering import FIGURES, FiguresGathering, FiguresReport
from hpcray.protocol import messages as m
from hpcray.runtime.raylet.event_log import NodeEventLog
from hpcray.runtime.raylet.event_loop import EventLoop
from hpcray.runtime.raylet.local_processes import NodeContext
from hpcray.runtime.raylet.memory_monitor import MemoryMonitor
from hpcray.runtime.raylet.router import Router

# ------------------------------------------------------------ host figures
# Use of the processors, the networks and the GPUs of this host, as the kernel and NVIDIA's driver count it.


_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SAMPLE_PERIOD = 1.0  # seconds between two looks at the GPUs
_SAMPLING = 30.0  # seconds after the last question for which the GPUs are looked at
_WORDS_OF_4_BYTES = 4  # InfiniBand's counters count them


def host_cpu_seconds() -> tuple[float, float]:
    """(seconds that the CPUs of this host were busy, seconds in all) since its start."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/stat", "rb") as file:
        times = [int(word) / _TICK for word in file.readline().split()[1:9]]
        return sum(times) - times[3] - times[4], sum(times)
    return 0.0, 0.0


def process_usage(pids: Iterable[int]) -> dict[int, tuple[float, int]]:
    """(seconds of CPU, resident bytes) of processes of this host; those that have ended are left out."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
            found[pid] = (int(fields[11]) + int(fields[12])) / _TICK, int(fields[21]) * _PAGE
    return found


def network_bytes() -> tuple[int, int]:
    """(received, sent) bytes of the networks of this host since its start: Ethernet and InfiniBand, not loopback."""
    received = sent = 0
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/net/dev", encoding="ascii") as file:
        for line in file.readlines()[2:]:
            name, _, rest = line.partition(":")
            if name.strip() != "lo":
                numbers = rest.split()
                received, sent = received + int(numbers[0]), sent + int(numbers[8])
    for port in Path("/sys/class/infiniband").glob("*/ports/*/counters"):
        with contextlib.suppress(OSError, ValueError):
            received += _WORDS_OF_4_BYTES * int((port / "port_rcv_data").read_text())
            sent += _WORDS_OF_4_BYTES * int((port / "port_xmit_data").read_text())
    return received, sent


class GpuSampler:
    """The GPUs of this host, read in a thread, as a driver that hangs must not stop a raylet.

    Nothing runs before the first question, nor for long after the last one. Without NVIDIA's library there are none.
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._asked = 0.0
        self._thread: threading.Thread | None = None
        self._usable = True

    def rows(self) -> list[dict[str, Any]]:
        """A row per GPU as last seen: "index", "name", "uuid", "busy" (share), "used" and "total" memory in bytes."""
        self._asked = time.monotonic()
        if self._usable and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, name="hpcray-gpus", daemon=True)
            self._thread.start()
        return self._rows

    def _run(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no library, or no driver
            self._usable = False
            return
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(place) for place in range(pynvml.nvmlDeviceGetCount())]
            while time.monotonic() - self._asked < _SAMPLING:
                self._rows = [_gpu_row(pynvml, place, handle) for place, handle in enumerate(handles)]
                time.sleep(_SAMPLE_PERIOD)
        except pynvml.NVMLError:
            self._usable = False
        finally:
            self._rows = []
            pynvml.nvmlShutdown()


def _gpu_row(nvml: Any, place: int, handle: Any) -> dict[str, Any]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    row = {"index": place, "name": nvml.nvmlDeviceGetName(handle), "uuid": nvml.nvmlDeviceGetUUID(handle)}
    row |= {"busy": 0.0, "used": memory.used, "total": memory.total}
    with contextlib.suppress(nvml.NVMLError):  # a MIG instance has no rate
        row["busy"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    return row


# ------------------------------------------------------------ node figures


_FRESH = 0.5
"""Seconds for which an answer serves further questions, however many look."""
_MOST_TIMES = 8
"""Functions whose run times are given for this node alone: those with most time."""
_EVENTS_KEPT = 20_000  # tasks and calls of workers that are gone
_PATIENCE = 0.5
"""Seconds that the processes of this node may take; of one that takes longer, what it said before counts."""


class NodeFigures:
    """Gathers the figures of this node, and with `FiguresGathering` those of others.

    Args:
        memory_monitor: reads the node's memory. events: its extensions add figures of their own.
    """

    def __init__(
        self,
        context: NodeContext,
        loop: EventLoop,
        router: Router,
        lease_manager: LocalLeaseManager,
        store: ObjectStore,
        memory_monitor: MemoryMonitor,
        events: NodeEventLog,
    ) -> None:
        self._context = context
        self._loop = loop
        self._router = router
        self._lease_manager = lease_manager
        self._store = store
        self._memory = memory_monitor
        self._node_events = events
        self._gathering = FiguresGathering(context.info.index)
        self._gpus = GpuSampler()
        self._number = 0
        self._round = 0
        self._awaited: dict[int, bytes] = {}  # question number: process
        self._said: dict[bytes, dict[str, Any]] = {}
        self._ended: dict[str, FunctionRow] = {}  # what processes that are gone had said
        self._partial = False
        self._events: dict[bytes, dict[str, Any]] = {}  # of workers that are gone, the earliest first
        self._report: FiguresReport | None = None
        self._report_at = 0.0

    def on_ask(self, now: float, src: bytes, req: int, args: Any) -> None:
        """Answer a question about nodes. args: the nodes, and the seconds that the answer may take."""
        nodes, patience = args
        self._send(self._gathering.ask(now, src, req, nodes, patience))
        self._loop.call_at(now + patience, lambda: self._send(self._gathering.tick(self._loop.now)))
        if not self._gathering.waits_for_own or self._awaited:
            return
        if self._report is not None and now - self._report_at < _FRESH:
            self._send(self._gathering.own(now, self._report))
        else:
            self._ask_processes(now, min(_PATIENCE, patience / 2))

    def on_answer(self, now: float, src: bytes, msg: m.GcsReply) -> Iterable[Any]:
        """A process of this node, or another raylet, has answered."""
        if not msg.req & 1:
            report = msgspec.msgpack.decode(msg.value, type=FiguresReport) if msg.ok else FiguresReport()
            self._send(self._gathering.answered(now, msg.req, report))
        elif self._awaited.pop(msg.req, None) is not None:
            if msg.ok:
                self._said[src] = msgspec.msgpack.decode(msg.value)
            if not self._awaited:
                self._complete(now)
        return ()

    def on_last(self, now: float, src: bytes, msg: m.LastFigures) -> Iterable[Any]:
        """A worker of this node ends in good order."""
        self._said.pop(src, None)
        said = msgspec.msgpack.decode(msg.figures)
        self._keep(said)
        events = said["events"]
        if events["ended"]:
            self._events[src] = events
            while sum(len(one["ended"]) for one in self._events.values()) > _EVENTS_KEPT and len(self._events) > 1:
                del self._events[next(iter(self._events))]
        return ()

    def events(self, limit: int) -> dict[bytes, dict[str, Any]]:
        """Return what workers that are gone have said of their last tasks, at most `limit` of each."""
        return {proc: {**said, "ended": said["ended"][-limit:]} for proc, said in self._events.items()}

    def node_died(self, now: float, node: int) -> None:
        """Another node is gone."""
        self._send(self._gathering.node_died(now, node))

    def usage(self) -> list[dict[str, Any]]:
        """A row per process of this node: "proc", "cpu" (seconds since its start), "rss" (bytes)."""
        links = self._router.links.values()
        used = process_usage(link.pid for link in links)
        return [
            {"proc": link.proc, "pid": link.pid, "cpu": used[link.pid][0], "rss": used[link.pid][1]}
            for link in links
            if link.pid in used
        ]

    # ------------------------------------------------------------ this node's own

    def _ask_processes(self, now: float, patience: float) -> None:
        self._round += 1
        for proc, link in self._router.links.items():
            if not link.closing:
                self._number += 1
                self._awaited[number := 2 * self._number + 1] = proc
                self._router.send(proc, m.Introspect(number, FIGURES))
        this = self._round
        self._loop.call_at(now + (patience if self._awaited else 0.0), lambda: self._end_round(this))

    def _end_round(self, number: int) -> None:
        if number == self._round and self._gathering.waits_for_own:
            self._awaited.clear()
            self._complete(self._loop.now)

    def _complete(self, now: float) -> None:
        """All have answered that will: make this node's report of it."""
        try:
            self._report = self._gather()
        except Exception:  # a question is no reason for this node to end
            traceback.print_exc()
            self._report = FiguresReport(partial=True)
        self._report_at = now
        self._send(self._gathering.own(now, self._report))

    def _gather(self) -> FiguresReport:
        links = self._router.links
        for proc in [proc for proc in self._said if proc not in links]:
            self._keep(self._said.pop(proc))
            self._partial = True  # it may have run more since it was asked
        report = FiguresReport(partial=self._partial)
        add_functions(report.functions, self._ended)
        for said in self._said.values():
            add_functions(report.functions, said["functions"])
            add_counts(report.running, said["running"])
            add_counts(report.queued, said["queued"])
            add_counts(report.elapsed, said["elapsed"])
            report.partial = report.partial or said["partial"]
        times = sorted(report.functions.items(), key=lambda item: -item[1][2])[:_MOST_TIMES]
        row = self.row() | {"times": {name: [sum(buckets.values()), us] for name, (_, _, us, buckets) in times}}
        self._node_events.inform(lambda extension: row.update(extension.figures()))
        report.nodes.append(msgspec.Raw(msgspec.msgpack.encode(row)))
        return report

    def _keep(self, said: dict[str, Any]) -> None:
        add_functions(self._ended, said["functions"])
        self._partial = self._partial or said["partial"]

    def row(self) -> dict[str, Any]:
        """This node: amounts in the units of users, bytes, seconds since a start that does not change."""
        info, router, manager = self._context.info, self._router, self._lease_manager
        core = manager.snapshot()
        usage = process_usage([os.getpid(), *(link.pid for link in router.links.values())])
        busy, seconds = host_cpu_seconds()
        received, sent = network_bytes()
        free, total, wire = core["available"], core["total"], router.wire_counts
        return {
            "node": info.index,
            "host": info.host,
            "time": time.time(),
            "resources": {name: [total[name] - free.get(name, 0.0), total[name]] for name in total},
            "cpu": {"host_busy": busy, "host_all": seconds, "host_count": os.cpu_count() or 1}
            | {"job": sum(cpu for cpu, _ in usage.values())},
            "memory": {**self._memory.current(), "rss": sum(rss for _, rss in usage.values())},
            "store": self._store.snapshot(),
            "network": {"received": received, "sent": sent},
            "wire": {"sent": [wire.sent, wire.sent_bytes], "received": [wire.received, wire.received_bytes]},
            "workers": core["pool"]["counts"],
            "actors": len(core["actors"]),
            "leases": len(core["leases"]),
            "waiting": sum(row["missing"] for row in core["pending"]),
            "gpus": self.own_gpus(),
        }

    def own_gpus(self) -> list[dict[str, Any]]:
        """The GPUs of this node among those of its host."""
        ids = self._lease_manager.resources.gpu_ids
        rows = self._gpus.rows() if ids else []
        chosen = [row for row in rows if str(row["index"]) in ids or row["uuid"] in ids]
        return chosen if len(chosen) == len(ids) else rows  # a cgroup that hides other GPUs numbers its own anew

    def _send(self, effects: Iterable[Send]) -> None:
        for effect in effects:
            self._router.send(effect.dest, effect.msg)
