"""What a process does when a node dies, and what it says of objects that are lost."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from hpcray.base.errors import (
    LocalRayletDiedError,
    ObjectLostError,
    ObjectReconstructionFailedError,
    ObjectReconstructionFailedLineageEvictedError,
    ObjectReconstructionFailedMaxAttemptsExceededError,
    OwnerDiedError,
)
from hpcray.base.ids import TASK_BYTES, show_proc
from hpcray.core.owner import lineage
from hpcray.core.owner.table import STORED, Waiter
from hpcray.runtime.refs import ObjectRef
from hpcray.wire import messages as m
from hpcray.wire.serialization import serialize_error

if TYPE_CHECKING:
    from hpcray.runtime.process import Process

_PUT = "It was made by put, which nothing can run again. hint: put(value, replicas=2) keeps a copy on a second node."
_WORDS = {
    lineage.RETRIES_DISABLED: "the task that made it must not run twice (max_retries=0, or max_task_retries=0 of an "
    "actor); hint: raise it",
    lineage.MAX_ATTEMPTS_EXCEEDED: "the task that makes it has used up its retries; hint: raise max_retries",
    lineage.LINEAGE_EVICTED: "the description of the task that made it was dropped to save memory; hint: raise "
    "HPCRAY_LINEAGE_LIMIT",
    lineage.LINEAGE_DISABLED: "nothing is rebuilt, as HPCRAY_LINEAGE_LIMIT is 0",
    lineage.TASK_CANCELLED: "the task that makes it was cancelled",
}
_KINDS = {
    lineage.MAX_ATTEMPTS_EXCEEDED: ObjectReconstructionFailedMaxAttemptsExceededError,
    lineage.LINEAGE_EVICTED: ObjectReconstructionFailedLineageEvictedError,
}


class Losses:
    """Of one process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def node_died(self, msg: m.NodeDied) -> None:
        """Everything that was there is gone: processes, leases, copies, borrowers (lock held)."""
        process, table = self._process, self._process.table
        if msg.node in table.dead_nodes:
            return
        table.dead_nodes.add(msg.node)
        retrying = process.submitter.retrying
        retrying.hold()
        try:
            for proc in sorted({*process.engine.peers_of(msg.node), *table.processes_of(msg.node)}):
                process.process_died(proc, f"node {msg.node} died: {msg.reason}")
            process.engine.lose_node(msg.node)
            table.node_died(msg.node, msg.reason)
        finally:
            retrying.go_on()

    def replicate(self, ref: ObjectRef[Any], copies: int) -> None:
        """Have an object that was just put kept on `copies` nodes, ours included, as far as nodes can take it."""
        process = self._process
        with process.engine.lock:
            if process.table.entries[ref._id].state != STORED:
                return  # it lives in this process, and with it
        others = [row["Index"] for row in process.gcs.nodes() if row["Alive"] and row["Index"] != process.node]
        start = int.from_bytes(ref._id[:TASK_BYTES], "big") % max(1, len(others))
        made, problem = 1, "there is no other node"
        for node in others[start:] + others[:start]:
            if made == copies:
                break
            problem = self._copy_to(ref._id, node)
            made += not problem
        if made < copies and "replicas" not in process._warned:
            process._warned.add("replicas")
            text = f"hpcray: put(replicas={copies}): only {made} of {copies} copies could be made: {problem}"
            print(text, file=sys.stderr, flush=True)

    def _copy_to(self, oid: bytes, node: int) -> str:
        """Have `node` keep a copy; why it does not, "" when it does."""
        process, table = self._process, self._process.table
        waiter = Waiter()
        with process.engine.lock:
            table.special.add(oid)
            try:
                table.replicas.hold(oid, table.entries[oid], node, waiter)
                process.block(waiter, None)
            finally:  # an interrupt may come before the answer
                problem = table.replicas.decided(oid, node)
        return problem


def lost_blob(oid: bytes, reason: str, why: str, dead: str | None) -> bytes:
    """The error that a lost object is from now on.

    Args:
        reason: how it was lost. why: why it cannot be made again, a word of `core.owner.lineage`.
        dead: why this process can ask for nothing any more.
    """
    if dead is not None:
        return serialize_error(LocalRayletDiedError(dead))
    ident, owner = oid.hex(), show_proc(oid)
    if why == lineage.OWNER_DIED:
        return serialize_error(OwnerDiedError(ident, owner, details=reason))
    if why == lineage.LOST:
        return serialize_error(ObjectLostError(ident, owner, details=reason))
    if why == lineage.PUT:
        return serialize_error(ObjectLostError(ident, owner, details=f"{reason}. {_PUT}"))
    kind = _KINDS.get(why, ObjectReconstructionFailedError)
    text = f"It is lost: {reason}. It cannot be made again: {_WORDS[why]}." if why in _WORDS else reason
    return serialize_error(kind(ident, why, text, owner))
