"""What a raylet answers when it is asked about its node (`Ask`).

=========  ==================  =========================================================================
what       arguments           answer
=========  ==================  =========================================================================
node       []                  "pid", "host", "template" (pid), "processes": a row for each one here
stack      []                  "threads" of the raylet
os         [pids]              what the kernel tells of processes of this node (`procfs.describe_process`), by pid, and
                               "stacks", as C code writes them that needs no answer of theirs
core       []                  `RayletCore.snapshot`, and "now" of its clock
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
from hpcray.host.emergency import answer, ask
from hpcray.host.procfs import describe_process
from hpcray.runtime.limits import keep_within_limits
from hpcray.runtime.local_links import Listener
from hpcray.runtime.memory_watch import MemoryWatch
from hpcray.runtime.stacks import thread_stacks
from hpcray.wire import messages as m

if TYPE_CHECKING:
    from hpcray.runtime.raylet import Raylet

_EVERYTHING = 1 << 40
_WRITING = 0.1
"""A process that was sent the signal has written its stacks after so many seconds."""


def attend(raylet: Raylet, listener: Listener, template: int, chunk: int, slots: int) -> None:
    """What every node has beside its cores: limits, a watch on memory, answers about itself, records if asked for.

    Args:
        template: pid of the template process. chunk, slots: of the store.
    """
    keep_within_limits(raylet, listener)
    answers = NodeAnswers(raylet, template)
    answers.methods["memory"] = MemoryWatch(raylet).snapshot
    if raylet.seat.config.record:
        from hpcray.runtime.recorders import Recorders

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
            "core": lambda: {**raylet.core.snapshot(), "now": raylet.loop.now},
            "object": self._object,
        }
        raylet.handlers[m.Ask] = self._asked

    def _asked(self, now: float, src: bytes, msg: m.Ask) -> Iterable[Any]:
        if msg.what == "os":
            return self._os(now, src, msg)
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

    def _os(self, now: float, src: bytes, msg: m.Ask) -> Iterable[Any]:
        """Answered a moment later: the processes get a signal, and write what they do."""
        (pids,) = msgspec.msgpack.decode(msg.args)
        router = self._raylet.router
        known = {link.pid for link in router.links.values()}
        asked = ask(pid for pid in pids if pid in known)

        def reply() -> None:
            rows = {
                pid: {**describe_process(pid), "stacks": answer(asked[pid]) if pid in asked else ""}
                for pid in pids
                if pid in known or pid in (self._template, os.getpid())
            }
            router.send(src, m.GcsReply(msg.req, True, msgspec.msgpack.encode(rows)))

        self._raylet.loop.call_at(now + _WRITING, reply)
        return ()

    def _object(self, oid: bytes) -> dict[str, Any] | None:
        return next((row for row in self._raylet.store.listing(_EVERYTHING) if row["id"] == oid), None)
