"""Pulling a copy of an object: which node is asked, with which tags, and how much of the object is here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hpcray.base.ids import PROC_BYTES, TASK_BYTES, raylet_of
from hpcray.core.effects import CancelReceive, Effect, Send, StartReceive
from hpcray.wire.messages import Pull as PullMessage

CHUNK = 4 << 20
"""Bytes of a piece, by default: a large object travels in pieces, so that what has come can be passed on."""

_PAGE = 4096
_TAG_NODE_SHIFT = 48
_TRIES = 3  # after so many failures we want to be sent to nobody else


@dataclass(slots=True, eq=False)
class Pull:
    """The nodes a copy is asked from, one after the other, and what has come.

    An object travels in chunks, each with a receive of its own; the tags of one attempt follow each other. After a
    failure the next node is asked for what is missing behind the last gap.

    Attributes:
        untried: nodes still to ask, the next one first.
        asked: every node this pull has known, so that none is asked twice.
        node: the node that is asked now; -1 before the first.
        tag: the first one of this attempt; -1 for none.
        posted: the receives that are not over, tag to number of the chunk.
        cancelled: CancelReceive was issued for them; the block is busy until the data plane has reported all ends.
        have: so many chunks at the front of the object are here.
        root: the node that was asked, and may have sent us, and others, elsewhere.
        order: the number that the root gave us among those who want the object; -1: none.
        tries: so many nodes would not, or could not, send.
        failed: the attempt is over without success.
        parent: whom the root named; it is asked once the receives from the root are over.
        failures: why each node asked so far did not deliver.
        full: one of them has the object, but no room to read it back from disk.
    """

    untried: list[int] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)
    node: int = -1
    tag: int = -1
    posted: dict[int, int] = field(default_factory=dict)
    cancelled: bool = False
    have: int = 0
    root: int = -1
    order: int = -1
    tries: int = 0
    failed: bool = False
    parent: int = -1
    failures: list[str] = field(default_factory=list)
    full: bool = False
    _ahead: set[int] = field(default_factory=set)

    def offer(self, nodes: Sequence[int], start: int) -> None:
        """Add nodes not known yet, from position `start` (modulo their number) on, so that askers spread."""
        fresh = [node for node in dict.fromkeys(nodes) if node not in self.asked]
        if fresh:
            cut = start % len(fresh)
            self.untried += fresh[cut:] + fresh[:cut]
            self.asked.update(fresh)

    def ask_next(self, ident: bytes, size: int, offset: int, me: Asker, out: list[Effect]) -> bool:
        """Post the receives and ask the next living node; False when none is left."""
        node = self._choose(me)
        if node < 0:
            return False
        each = me.chunk_for(size)
        chunks = chunks_of(size, each)
        self.node, self.tag = node, me.next_tags(chunks - self.have)
        if self.root < 0:
            self.root = node
        self._ahead.clear()
        # The receives are posted first: the bytes may come at once.
        for tag, index in enumerate(range(self.have, chunks), self.tag):
            at = index * each
            self.posted[tag] = index
            out.append(StartReceive(ident, node, tag, offset + at, min(each, size - at)))
        root = self.root if self.order >= 0 else -1
        chunk = each if chunks > 1 else 0
        whole = self.tries >= _TRIES
        out.append(Send(raylet_of(node), PullMessage(ident, self.tag, size, chunk, self.have, root, self.order, whole)))
        return True

    def _choose(self, me: Asker) -> int:
        parent, self.parent = self.parent, -1
        if parent >= 0:
            self.asked.add(parent)
            # Should the parent fail, the root is asked again.
            self.untried = [self.root, *(node for node in self.untried if node != parent)]
            self.untried.insert(0, parent)
        while self.untried:
            node = self.untried.pop(0)
            if node not in me.dead_nodes:
                return node
            self.failures.append(f"node {node}: the node died")
            self.root = self.order = -1
        return -1

    def sources(self) -> list[int]:
        """Nodes that may have the object whole."""
        return [*([self.root] if self.root >= 0 else []), *(node for node in self.untried if node != self.root)]

    def passes_on(self, msg: PullMessage) -> bool:
        """Whether the sender of `msg` may wait here for chunks that are still to come.

        Nodes that wait for each other in a circle would wait for ever. So only those wait whom the root of this very
        attempt has sent, with a higher number than ours; and when our root or our number changes, they are refused.
        """
        return self.tag >= 0 and msg.root == self.root and self.order < msg.order

    def cancel(self, reason: str, out: list[Effect], blame: bool = True) -> None:
        """Take the posted receives back; the data plane reports their ends, and only then the next node is asked.

        Args:
            blame: whether it counts among `tries`: not where the next attempt has no reason to end likewise.
        """
        if not self.cancelled:
            self.failures.append(f"node {self.node}: {reason}")
            self.failed = True
            self.tries += blame
            self._take_back(out)

    def start_afresh(self) -> None:
        """An attempt has failed and nobody waits here: whom we ask next is our root."""
        self.failed = False
        self.root = self.order = -1

    def redirect(self, parent: int, order: int, out: list[Effect]) -> None:
        """The root says: ask `parent` instead, you are number `order`."""
        if not self.cancelled:
            self.parent, self.order = parent, order
            self._take_back(out)

    def ended(self, tag: int, error: str | None, out: list[Effect]) -> None:
        """A posted receive is over. After a failed one the others are taken back."""
        index = self.posted.pop(tag)
        if error is None:
            self._ahead.add(index)
            while self.have in self._ahead:
                self._ahead.discard(self.have)
                self.have += 1
        elif not self.cancelled:
            self.cancel(error, out)
        if not self.posted:
            self.tag = -1
            self.cancelled = False

    def _take_back(self, out: list[Effect]) -> None:
        self.cancelled = True
        out.extend(CancelReceive(tag) for tag in self.posted)


class Asker:
    """A node as the receiving side of transfers: counts them, knows which nodes are dead.

    Args:
        node: index of this node.
        chunk: most bytes of a piece of a large object.
    """

    __slots__ = ("_count", "chunk", "dead_nodes", "node")

    def __init__(self, node: int, dead_nodes: set[int], chunk: int = CHUNK) -> None:
        self.node = node
        self.chunk = chunk
        self.dead_nodes = dead_nodes
        self._count = 0

    def start(self, ident: bytes) -> int:
        """Where in a list of nodes to begin: different from object to object and from asker to asker."""
        return (
            int.from_bytes(ident[PROC_BYTES:TASK_BYTES], "big") + int.from_bytes(ident[TASK_BYTES:], "big") + self.node
        )

    def chunk_for(self, size: int) -> int:
        """Bytes of each piece of an object of `size` bytes, but for the last: no piece is much shorter than others."""
        even = -(-size // chunks_of(size, self.chunk))
        return min(self.chunk, -(-even // _PAGE) * _PAGE)

    def next_tags(self, number: int) -> int:
        """The first of so many tags, one behind the other, that no other transfer to this node has, or had."""
        first = self._count + 1
        self._count += number
        return transfer_tag(self.node, first)


def chunks_of(size: int, chunk: int) -> int:
    """In how many pieces an object of `size` bytes travels; at least one."""
    return max(1, -(-size // chunk))


def transfer_tag(node: int, counter: int) -> int:
    """Tag of a transfer to `node`: node index u16 | counter u48, counted by the receiving node.

    One u64 names one transfer among all of the job: the receiver's counter makes it unique at the receiver, the node
    index at a sender that serves several receivers.
    """
    return node << _TAG_NODE_SHIFT | counter & (1 << _TAG_NODE_SHIFT) - 1
