"""Where frames go: to a process of this node, into another node's batch, or back to the sender as Undeliverable.

Frames that only pass through are never decoded. What this raylet itself says in one turn of its loop is grouped per
destination into one frame. Order is kept per destination: what we said goes out before a frame that came in after it.
"""

from __future__ import annotations

import contextlib
import socket

from hpcray.base.ids import HEAD, node_of, raylet_of
from hpcray.runtime.headship import Headship, ToHead
from hpcray.runtime.local_links import Link, Piece
from hpcray.transport.base import ControlTransport, PeerLost
from hpcray.wire.frames import pack
from hpcray.wire.messages import Message, Undeliverable, encode

_MOST_REMEMBERED = 10_000


class Router:
    """The routes of one raylet.

    Attributes:
        links: the local processes that said Hello.
        dirty: links with something to send.
        inbox: messages of this raylet to itself.
        guests: processes of neighbouring nodes that read in this node's store.
        lost_nodes: node to reason.
        spoken: the nodes to which something was sent; who looks at it empties it.
        headship: where the head is.
        mine: the addresses for which this raylet is meant; the head's among them where it is the head.
        to_head: what is on its way to the head.
        overdue: (source, frame) of what waited for a head, now that this raylet is it.
    """

    def __init__(
        self, node: int, cluster_size: int, control: ControlTransport | None, headship: Headship | None = None
    ) -> None:
        self.me = raylet_of(node)
        self.headship = headship or Headship()
        self.mine = {self.me, HEAD} if self.headship.node == node else {self.me}
        self.to_head = ToHead(self.headship)
        self.overdue: list[tuple[bytes, bytes]] = []
        self.headship.listeners.append(self._head_moved)
        self.links: dict[bytes, Link] = {}
        self.dirty: list[Link] = []
        self.inbox: list[Message] = []
        self.guests: dict[bytes, Link] = {}
        self._answers: dict[bytes, list[Message]] = {}
        self.lost_nodes: dict[int, str] = {}
        self.spoken: set[int] = set()
        self._node = node
        self._cluster_size = cluster_size
        self._control = control
        self._pending: dict[bytes, list[Message]] = {}
        self._batches: dict[int, list[Piece]] = {}
        self._ends: dict[bytes, str] = {}

    def send(self, dest: bytes, msg: Message) -> None:
        """Say something to any process of the job, at the end of this turn."""
        if dest in self.mine:
            self.inbox.append(msg)
            return
        waiting = self._pending.get(dest)
        if waiting is None:
            self._pending[dest] = [msg]
        else:
            waiting.append(msg)

    def forward(self, dest: bytes, src: bytes, frame: Piece) -> None:
        """Pass a frame on."""
        if self._pending:
            self.encode()
        link = self.links.get(dest)
        if link is not None:
            link.peers.add(src)
            self._append(link, frame)
        else:
            self._to_node(dest, src, frame)

    def forget(self, proc: bytes, reason: str) -> None:
        """From now on frames for this local process are undeliverable, for this reason."""
        self.links.pop(proc, None)
        if len(self._ends) >= _MOST_REMEMBERED:
            del self._ends[next(iter(self._ends))]
        self._ends[proc] = reason

    def lose_node(self, node: int, reason: str) -> None:
        """From now on frames for this node are undeliverable."""
        self.lost_nodes[node] = reason
        self._batches.pop(node, None)

    def last_word(self, node: int, msg: Message) -> None:
        """Say something to the raylet of a node that is about to be lost, past all that waits; it may arrive or not."""
        if self._control is not None and node not in self.lost_nodes:
            with contextlib.suppress(PeerLost):
                self._control.send(node, pack(raylet_of(node), self.me, encode([msg])))

    def flush(self) -> list[tuple[int, str]]:
        """Hand the batches to the transport; the nodes that could not be reached, and why. Links are the caller's."""
        failed: list[tuple[int, str]] = []
        if self._pending:
            self.encode()
        if self._batches and self._control is not None:
            batches, self._batches = self._batches, {}
            self.spoken.update(batches)
            for node, frames in batches.items():
                try:
                    self._control.send(node, b"".join(frames))
                except PeerLost as error:
                    failed.append((node, error.why))
        return failed

    def _append(self, link: Link, frame: Piece) -> None:
        if link.closing:
            return  # its peers are told of its end
        if not link.out:
            self.dirty.append(link)
        link.out.append(frame)

    def _to_node(self, dest: bytes, src: bytes, frame: Piece) -> None:
        node = (dest[0] << 8) | dest[1]
        batch = self._batches.get(node)
        if batch is not None:
            batch.append(frame)
        elif node == self._node or node >= self._cluster_size or node in self.lost_nodes or self._control is None:
            if dest == HEAD:
                self._to_head(src, frame)
            else:
                self._undeliverable(dest, src)
        else:
            self._batches[node] = [frame]

    def _to_head(self, src: bytes, frame: Piece) -> None:
        if self.headship.node == self._node:
            self.overdue.append((src, bytes(frame)))
        elif self.to_head.passes(frame):
            self._batches.setdefault(self.headship.node, []).append(frame)

    def _head_moved(self) -> None:
        again = self.to_head.again()
        if self.headship.node == self._node:
            self.mine = {self.me, HEAD}
            self.overdue += [(frame[12:20], frame) for frame in again]
        elif again:
            self._batches.setdefault(self.headship.node, []).extend(again)

    def _undeliverable(self, dest: bytes, src: bytes) -> None:
        node = node_of(dest)
        if node in self.lost_nodes:
            reason = f"node {node} is dead: {self.lost_nodes[node]}"
        else:
            reason = self._ends.get(dest, "no such process")
        self.send(src, Undeliverable(dest, reason))

    def welcome(self, link: Link, welcome: Message, arena_fd: int) -> None:
        """The first message to a process, with the descriptor of what it is to map.

        Raises:
            OSError: it cannot be sent.
        """
        frame = pack(link.proc, self.me, encode([welcome]))
        sent = socket.send_fds(link.sock, [frame], [arena_fd])
        if sent < len(frame):
            link.out.append(frame[sent:])
            self.dirty.append(link)

    def answer(self, guest: bytes, msg: Message) -> None:
        """What the store says to a guest. All else goes to it, as to other processes of its node, through its raylet;
        so nothing that has an order comes on two ways."""
        self._answers.setdefault(guest, []).append(msg)

    def encode(self) -> None:
        """Make frames of what this raylet has said, and give them to links and batches."""
        if self._answers:
            answers, self._answers = self._answers, {}
            for guest, messages in answers.items():
                link = self.guests.get(guest)
                if link is not None:
                    self._append(link, pack(guest, self.me, encode(messages)))
        # Undeliverable answers may be added meanwhile, hence the loop.
        while self._pending:
            pending, self._pending = self._pending, {}
            for dest, messages in pending.items():
                frame = pack(dest, self.me, encode(messages))
                link = self.links.get(dest)
                if link is not None:
                    self._append(link, frame)
                else:
                    self._to_node(dest, self.me, frame)
