"""Pulling a copy of an object: which node is asked, with which tag, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcray.base.ids import PROC_BYTES, TASK_BYTES, raylet_of
from hpcray.core.effects import CancelReceive, Effect, Send, StartReceive
from hpcray.wire.messages import Pull as PullMessage

_TAG_NODE_SHIFT = 48


@dataclass(slots=True, eq=False)
class Pull:
    """The nodes a copy is asked from, one after the other.

    Attributes:
        untried: nodes still to ask, the next one first.
        asked: every node this pull has known, so that none is asked twice.
        node: the node that is asked now; -1 before the first.
        tag: of the receive that is posted now; -1 for none.
        cancelled: CancelReceive was issued for it; its block is busy until the data plane reports the end.
        failures: why each node asked so far did not deliver.
        full: one of them has the object, but no room to read it back from disk.
    """

    untried: list[int] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)
    node: int = -1
    tag: int = -1
    cancelled: bool = False
    failures: list[str] = field(default_factory=list)
    full: bool = False

    def offer(self, nodes: list[int], start: int) -> None:
        """Add nodes not known yet, from position `start` (modulo their number) on, so that askers spread."""
        fresh = [node for node in dict.fromkeys(nodes) if node not in self.asked]
        if fresh:
            cut = start % len(fresh)
            self.untried += fresh[cut:] + fresh[:cut]
            self.asked.update(fresh)

    def ask_next(self, ident: bytes, size: int, offset: int, me: Asker, out: list[Effect]) -> bool:
        """Post a receive and ask the next living node; False when none is left."""
        while self.untried:
            node = self.untried.pop(0)
            if node in me.dead_nodes:
                self.failures.append(f"node {node}: the node died")
                continue
            self.node, self.tag = node, me.next_tag()
            # The receive is posted first: the bytes may come at once.
            out.append(StartReceive(ident, node, self.tag, offset, size))
            out.append(Send(raylet_of(node), PullMessage(ident, self.tag, size)))
            return True
        return False

    def cancel(self, reason: str, out: list[Effect]) -> None:
        """Take the posted receive back; the data plane reports its end, and only then the next node is asked."""
        if not self.cancelled:
            self.cancelled = True
            self.failures.append(f"node {self.node}: {reason}")
            out.append(CancelReceive(self.tag))

    def ended(self, error: str | None) -> None:
        """The posted receive is over."""
        if error is not None and not self.cancelled:
            self.failures.append(f"node {self.node}: {error}")
        self.tag = -1
        self.cancelled = False


class Asker:
    """A node as the receiving side of transfers: counts them, knows which nodes are dead."""

    __slots__ = ("_count", "dead_nodes", "node")

    def __init__(self, node: int) -> None:
        self.node = node
        self.dead_nodes: set[int] = set()
        self._count = 0

    def start(self, ident: bytes) -> int:
        """Where in a list of nodes to begin: different from object to object and from asker to asker."""
        return (
            int.from_bytes(ident[PROC_BYTES:TASK_BYTES], "big") + int.from_bytes(ident[TASK_BYTES:], "big") + self.node
        )

    def next_tag(self) -> int:
        """A tag no other transfer to this node has, or had."""
        self._count += 1
        return transfer_tag(self.node, self._count)


def transfer_tag(node: int, counter: int) -> int:
    """Tag of a transfer to `node`: node index u16 | counter u48, counted by the receiving node.

    One u64 names one transfer among all of the job: the receiver's counter makes it unique at the receiver, the node
    index at a sender that serves several receivers.
    """
    return node << _TAG_NODE_SHIFT | counter & (1 << _TAG_NODE_SHIFT) - 1
