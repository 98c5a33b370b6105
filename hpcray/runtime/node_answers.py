"""What a raylet answers when it is asked about its node (`Ask`).

=========  ==================  =========================================================================
what       arguments           answer
=========  ==================  =========================================================================
node       []                  "pid", "host", "template" (pid), "processes": a row for each one here
stack      []                  "threads" of the raylet
os         [pids]              what the kernel tells of processes of this node (`procfs.describe_process`), by pid
core       []                  `RayletCore.snapshot`
object     [object id]         its row in the store (`list_objects`), or nil
memory     []                  `MemoryWatch.snapshot`
log        [core, start]       the recorded inputs of a core: `Recorders.portion`
=========  ==================  =========================================================================
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from hpcray.base.ids import raylet_of
from hpcray.host.procfs import describe_process
from hpcray.runtime.limits import keep_within_limits
from hpcray.runtime.local_links import Listener
from hpcray.runtime.memory_watch import MemoryWatch
from hpcray.runtime.recorders import Recorders
from hpcray.runtime.stacks import thread_stacks
from hpcray.wire import messages as m

if TYPE_CHECKING:
    from hpcray.runtime.raylet import Raylet

_EVERYTHING = 1 << 40


def attend(raylet: Raylet, listener: Listener, template: int, chunk: int, slots: int) -> None:
    """What every node has beside its cores: limits, a watch on memory, answers about itself, records if asked for.

    Args:
        template: pid of the template process. chunk, slots: of the store.
    """
    keep_within_limits(raylet, listener)
    answers = NodeAnswers(raylet, template)
    answers.methods["memory"] = MemoryWatch(raylet).snapshot
    if raylet.seat.config.record:
        answers.methods["log"] = Recorders(raylet, chunk, slots).portion


class NodeAnswers:
    """One raylet's answers.

    Args:
        raylet: its table gets the handler. template: pid of the template process.
    """

    def __init__(self, raylet: Raylet, template: int) -> None:
        self._raylet = raylet
        self._template = template
        self.methods: dict[str, Callable[..., Any]] = {
            "node": self._node,
            "stack": lambda: {"threads": thread_stacks()},
            "os": self._os,
            "core": raylet.core.snapshot,
            "object": self._object,
        }
        raylet.handlers[m.Ask] = self._asked

    def _asked(self, now: float, src: bytes, msg: m.Ask) -> Iterable[Any]:
        method = self.methods.get(msg.what)
        if method is None:
            reply = m.GcsReply(msg.req, False, f"unknown question {msg.what!r}".encode())
        else:
            args = msgspec.msgpack.decode(msg.args) if msg.args else []
            reply = m.GcsReply(msg.req, True, msgspec.msgpack.encode(method(*args)))
        self._raylet.router.send(src, reply)
        return ()

    def _node(self) -> dict[str, Any]:
        raylet = self._raylet
        workers = raylet.core.pool.workers
        rows = []
        for link in raylet.router.links.values():
            worker = workers.get(link.proc)
            spec = worker.claim.spec if worker is not None and worker.claim is not None else None
            rows.append({
                "proc": link.proc,
                "pid": link.pid,
                "kind": link.kind,
                "state": worker.state if worker is not None else "",
                "actor": spec.actor if spec is not None else b"",
                "class": spec.class_name if spec is not None else "",
            })  # fmt: skip
        here = {row["proc"] for row in rows}
        rows += [
            {"proc": proc, "pid": worker.pid, "kind": "worker", "state": worker.state, "actor": b"", "class": ""}
            for proc, worker in workers.items()
            if proc not in here
        ]
        return {
            "proc": raylet_of(raylet.node),
            "pid": os.getpid(),
            "host": raylet.seat.info.host,
            "template": self._template,
            "processes": rows,
        }

    def _os(self, pids: list[int]) -> dict[int, dict[str, Any]]:
        known = {link.pid for link in self._raylet.router.links.values()} | {self._template, os.getpid()}
        return {pid: describe_process(pid) for pid in pids if pid in known}

    def _object(self, oid: bytes) -> dict[str, Any] | None:
        return next((row for row in self._raylet.store.listing(_EVERYTHING) if row["id"] == oid), None)
