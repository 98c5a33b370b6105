"""The replies of a raylet to `Introspect`.

=========  ==================  =========================================================================
what       arguments           reply
=========  ==================  =========================================================================
node       []                  "pid", "host", "template" (pid), "processes": a row for each one here, "ended":
                               workers that have ended, and how, "preloaded": modules that the fork server was to import
                               ahead of the workers, and why it could not ("" if it has)
stack      []                  "threads" of the raylet
os         [pids]              the kernel's view of processes of this node (`process_tree.describe_process`), by pid,
                               and "stacks", written by a signal handler in C that works in a blocked process
core       []                  `LocalLeaseManager.snapshot`, and "now" of its clock
object     [object id]         its row in the store (`list_objects`), or nil
memory     []                  `MemoryMonitor.snapshot`
figures    [nodes, seconds]    the figures of these nodes, gathered within so many seconds: `FiguresReport`
activity   [pids]              `Activity` of the programs on this node, "gpu" (share of the busiest one that is in use),
                               "transfers" (how many of objects are under way). Work of `pids` does not count
waits      []                  the waits of these processes: `ProcessWait`s
transfers  []                  transfers of objects that are under way: `ObjectStore.transfers`
usage      []                  CPU and memory of this node's processes: `NodeFigures.usage`
log        [core, start]       the recorded inputs of a core: `CoreRecorders.portion`
log_files  [pattern]           the names of log files: `LogFiles.find`
log_piece  [name, start, size] a piece of one: `LogFiles.read`
log_next   [name, inode, at]   the next piece of one, or of those that took its place: `LogFiles.read_on`
log_sizes  []                  the sizes of the files of workers: `LogFiles.sizes`
log_tail   [lines]             what was written to last: `LogFiles.tail`
=========  ==================  =========================================================================
"""

from __future__ import annotations

import contextlib
import os
import stat
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from hpcray.common.ids import raylet_of
from hpcray.common.job_names import (
    LOG_PIECE,
    LOG_PREFIX_ACTOR_NAME,
    LOG_PREFIX_JOB_ID,
    LOG_PREFIX_TASK_ID,
    LOG_PREFIX_TASK_NAME,
    logs_directory,
    parse_worker_log_name,
)
from hpcray.diagnostics.figures_gathering import FIGURES
from hpcray.diagnostics.node_figures import NodeFigures
from hpcray.diagnostics.process_activity import ActivityMeter, waits_of
from hpcray.platform.private_files import open_private_file
from hpcray.platform.process_tree import ProcessIdentity, describe_process
from hpcray.platform.stacks import read_stack_dump, request_stack_dumps, thread_stacks
from hpcray.protocol import messages as m
from hpcray.runtime.node.node_features import NodeParts
from hpcray.runtime.raylet.log_monitor import read_on

_EVERYTHING = 1 << 40
_STACK_DUMP_TIME = 0.1
"""Seconds after the signal in which a process writes its stacks."""


class CoreRecorders:
    """The records of one raylet's cores. Make it before their first input, and before handlers are bound."""

    def __init__(self, parts: NodeParts) -> None:
        from hpcray.diagnostics.record_replay import Recorder  # few jobs are recorded

        context, lease_manager, store, head = parts.context, parts.lease_manager, parts.store, parts.head
        config = context.config
        common: dict[str, Any] = {"config": config.as_dict()}
        size, spill = context.info.arena_size, config.spill_threshold
        made: dict[str, dict[str, Any]] = {
            "raylet": {
                "total": context.info.total,
                "cluster_size": context.cluster_size,
                "gpu_ids": list(lease_manager.resources.gpu_ids),
                "device_ids": {name: list(ids) for name, ids in lease_manager.resources.device_ids.items()},
                "limit": lease_manager.pool.limit,
            },
            "head": {},
            "store": {
                "store": {
                    "size": size,
                    "spill_threshold": spill,
                    "chunk": parts.chunk,
                    "slots": parts.slots,
                    "overflow": parts.overflow,
                }
            },
        }
        cores = {"raylet": lease_manager, "head": head, "store": store}
        self._recorders = {
            name: Recorder(name, context.info.index, {**common, **made[name]})
            for name, core in cores.items()
            if core is not None
        }
        for name, recorder in self._recorders.items():
            recorder.wrap_all(cores[name])

    def portion(self, name: str = "", start: int = 0) -> Any:
        """Return about 1 MB of the record of core `name`, from input `start` on; without `name`, the cores' names."""
        if not name:
            return list(self._recorders)
        from hpcray.diagnostics.record_replay import portion

        return portion(self._recorders[name].record, start)


class RayletIntrospection:
    """Replies to `Introspect` for one raylet.

    Attributes:
        preloaded: modules that the fork server was to import ahead of the workers, in their order, and why it could
            not; "" if it has.
    """

    def __init__(self, parts: NodeParts) -> None:
        loop, lease_manager = parts.loop, parts.lease_manager
        log_files = LogFiles(logs_directory(parts.context.session_dir))
        self._figures = figures = NodeFigures(
            parts.context, loop, parts.router, lease_manager, parts.store, parts.memory_monitor, parts.events
        )
        self.preloaded: dict[str, str] = {}
        self._node = parts.context.info.index
        self._host = parts.context.info.host
        self._loop = loop
        self._router = parts.router
        self._pool = lease_manager.pool
        self._ended = lease_manager.ended
        self._store = parts.store
        self._template_pid = parts.template_pid
        self._meter: ActivityMeter | None = None
        self._methods: dict[str, Callable[..., Any]] = {
            "node": self._describe_node,
            "stack": lambda: {"threads": thread_stacks()},
            "core": lambda: {**lease_manager.snapshot(), "now": loop.now},
            "object": self._describe_object,
            "memory": parts.memory_monitor.snapshot,
            "events": parts.events.rows,
            "log_files": log_files.find,
            "log_piece": log_files.read,
            "log_next": log_files.read_on,
            "log_sizes": log_files.sizes,
            "log_tail": log_files.tail,
            "usage": figures.usage,
            "ended_events": figures.events,
            "transfers": parts.store.transfers,
            "activity": self._activity,
            "waits": lambda: msgspec.to_builtins(waits_of(self._roots(), self._spared())),
        }
        if parts.context.config.record:
            self._methods["log"] = CoreRecorders(parts).portion

    def on_introspect(self, now: float, src: bytes, msg: m.Introspect) -> Iterable[Any]:
        """Send the reply, or schedule it. A question that cannot be answered is no reason for this node to end."""
        try:
            self._answer(now, src, msg)
        except Exception as error:
            self._fail(src, msg, error)
        return ()

    def on_answer(self, now: float, src: bytes, msg: m.GcsReply) -> Iterable[Any]:
        """A process of this node, or another raylet, answers what the figures of nodes need."""
        return self._figures.on_answer(now, src, msg)

    def on_last_figures(self, now: float, src: bytes, msg: m.LastFigures) -> Iterable[Any]:
        """A worker of this node ends in good order."""
        return self._figures.on_last(now, src, msg)

    def node_died(self, now: float, node: int) -> None:
        """Another node is gone."""
        self._figures.node_died(now, node)

    def row(self) -> dict[str, Any]:
        """Return the figures of this node: `NodeFigures.row`."""
        return self._figures.row()

    def _answer(self, now: float, src: bytes, msg: m.Introspect) -> None:
        if msg.what == "os":
            self._describe_processes(now, src, msg)
            return
        if msg.what == FIGURES:
            self._figures.on_ask(now, src, msg.req, msgspec.msgpack.decode(msg.args))
            return
        method = self._methods.get(msg.what)
        if method is None:
            reply = m.GcsReply(msg.req, False, f"unknown question {msg.what!r}".encode())
        else:
            args = msgspec.msgpack.decode(msg.args) if msg.args else []
            reply = m.GcsReply(msg.req, True, msgspec.msgpack.encode(method(*args)))
        self._router.send(src, reply)

    def _fail(self, src: bytes, msg: m.Introspect, error: Exception) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(last.filename)}:{last.lineno}"
        text = f"node {self._node} cannot answer the question {msg.what!r}: {type(error).__name__}: {error} ({where})"
        self._router.send(src, m.GcsReply(msg.req, False, text.encode()))

    def _describe_node(self) -> dict[str, Any]:
        workers = self._pool.workers
        rows = []
        for link in self._router.links.values():
            worker = workers.get(link.proc)
            spec = worker.allocation.actor_spec if worker is not None and worker.allocation is not None else None
            identity = ProcessIdentity.of(link.pid)
            rows.append({
                "proc": link.proc,
                "pid": link.pid,
                "kind": link.kind,
                "state": worker.state if worker is not None else "",
                "actor": spec.actor if spec is not None else b"",
                "class": spec.class_name if spec is not None else "",
                "started_ms": identity.started_ms if identity is not None else None,
            })  # fmt: skip
        here = {row["proc"] for row in rows}
        rows += [
            {"proc": proc, "pid": worker.pid, "kind": "worker", "state": worker.state, "actor": b"", "class": ""}
            for proc, worker in workers.items()
            if proc not in here
        ]
        return {
            "proc": raylet_of(self._node),
            "pid": os.getpid(),
            "host": self._host,
            "template": self._template_pid,
            "processes": rows,
            "ended": self._ended.rows(self._loop.now),
            "ended_drivers": self._ended.drivers(self._loop.now),
            "preloaded": self.preloaded,
        }

    def _activity(self, asleep: list[int]) -> dict[str, Any]:
        self._meter = self._meter or ActivityMeter()
        found: dict[str, Any] = msgspec.to_builtins(self._meter.look(self._roots(), self._spared(), asleep))
        busy = max((row["busy"] for row in self._figures.own_gpus()), default=0.0)
        return {**found, "gpu": busy, "transfers": len(self._store.transfers())}

    def _roots(self) -> list[int]:
        return [os.getpid(), *(link.pid for link in self._router.links.values())]

    def _spared(self) -> set[int]:
        return {os.getpid(), self._template_pid}

    def _describe_processes(self, now: float, src: bytes, msg: m.Introspect) -> None:
        """Reply a moment later: the processes get a signal, and write their stacks."""
        (pids,) = msgspec.msgpack.decode(msg.args)
        router = self._router
        known = {link.pid for link in router.links.values()}
        dumps = request_stack_dumps(pid for pid in pids if pid in known)

        def reply() -> None:
            try:
                rows = {
                    pid: {**describe_process(pid), "stacks": read_stack_dump(dumps[pid]) if pid in dumps else ""}
                    for pid in pids
                    if pid in known or pid in (self._template_pid, os.getpid())
                }
                router.send(src, m.GcsReply(msg.req, True, msgspec.msgpack.encode(rows)))
            except Exception as error:
                self._fail(src, msg, error)

        self._loop.call_at(now + _STACK_DUMP_TIME, reply)

    def _describe_object(self, oid: bytes) -> dict[str, Any] | None:
        return next((row for row in self._store.largest_objects(_EVERYTHING) if row["id"] == oid), None)


# ------------------------------------------------------------ log files
# The log files of this node, for questions of `hpcray.util.state`. A raylet reads a piece at a time.


_MARKS = (LOG_PREFIX_ACTOR_NAME, LOG_PREFIX_JOB_ID, LOG_PREFIX_TASK_ID, LOG_PREFIX_TASK_NAME)
_TAILED, _TAIL_BYTES = 4, 8 << 10  # files, and bytes of each


class LogFiles:
    """The files in one directory.

    Args:
        directory: with the log files.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def find(self, pattern: str = "*") -> dict[str, Any]:
        """Return the "names" of the files that match a pattern, directories with a slash; or a "problem"."""
        path = PurePosixPath(pattern)
        if path.anchor or ".." in path.parts:
            text = f"Invalid glob filter: {pattern}. It must be a relative path and cannot contain '..'."
            return {"problem": text}
        try:
            found = [
                one.relative_to(self._directory).as_posix() + ("/" if one.is_dir() else "")
                for one in self._directory.glob(pattern)
            ]
        except (OSError, ValueError, NotImplementedError) as error:
            return {"problem": f"Invalid glob filter: {pattern}. {error}"}
        return {"names": sorted(found)}

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return (size, inode) of the files of workers, by name, without those that are rotated at this moment."""
        found = {}
        for one in self._directory.glob("worker-*"):
            with contextlib.suppress(OSError):
                state = one.stat()
                if stat.S_ISREG(state.st_mode):
                    found[one.name] = state.st_size, state.st_ino
        return found

    def read_on(self, name: str, inode: int, offset: int) -> dict[str, Any]:
        """Return the next "data" of a worker's file, rotated or not, and "inode", "offset" and "more": `read_on`."""
        if parse_worker_log_name(name) is None or os.path.basename(name) != name:
            return {"problem": f"{name} is no log file of a worker"}
        data, inode, offset, more = read_on(str(self._directory / name), inode, offset, LOG_PIECE)
        return {"data": data, "inode": inode, "offset": offset, "more": more}

    def tail(self, lines: int) -> list[tuple[str, float, str]]:
        """Return the last lines of what was written to last: (name of the file, time of its last change, line)."""
        try:
            files = [(one.stat().st_mtime, one.name) for one in self._directory.glob("worker-*") if one.is_file()]
        except OSError:
            return []
        found: list[tuple[str, float, str]] = []
        for changed, name in sorted(files)[-_TAILED:]:
            path = str(self._directory / name)
            with contextlib.suppress(OSError), os.fdopen(open_private_file(path), "rb", buffering=0) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                text = file.read(_TAIL_BYTES).decode(errors="replace")
                told = [line for line in text.splitlines() if line and not line.startswith(_MARKS)]
                found += [(name, changed, line) for line in told[-lines:]]
        return found[-lines:]

    def read(self, name: str, start: int, size: int) -> dict[str, Any]:
        """Return the "data" of a file from offset `start` on, at most `size` bytes, and its "size"; or a "problem"."""
        path = os.path.abspath(self._directory / name)
        if not os.path.isfile(path):
            return {"problem": f"A file is not found at: {path}"}
        if not Path(path).is_relative_to(self._directory):
            return {"problem": f"{path} not in {self._directory}"}
        try:
            with os.fdopen(open_private_file(str(path)), "rb", buffering=0) as file:
                file.seek(start)
                return {"data": file.read(min(size, LOG_PIECE)), "size": os.fstat(file.fileno()).st_size}
        except OSError as error:
            return {"problem": f"{path} cannot be read: {error}"}
