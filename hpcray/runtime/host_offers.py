"""The sending side of transfers between nodes of one host: who reads here, and what was offered to whom."""

from __future__ import annotations

import socket
import struct

from hpcray.runtime.host_links import ACK, GREETING, HELLO, MAGIC, OFFER, READY, HostLink, LinkError, Watch
from hpcray.runtime.local_links import Listener
from hpcray.transport.base import Report


class Offers:
    """Accepts the raylets of this host that want to read our arena, and tells them what to read.

    Args:
        node: our number.
        listener: where they connect; it asks the kernel who does.
        arena_fd: the arena, of which every one of them gets the descriptor.
        arena_size: bytes of it.
        watch: gets the descriptors.
        done: gets the reports.

    Attributes:
        flying: number of offers that are not acknowledged.
    """

    def __init__(
        self, node: int, listener: Listener, arena_fd: int, arena_size: int, watch: Watch, done: list[Report]
    ) -> None:
        self.flying = 0
        self._node = node
        self._listener = listener
        self._arena_fd = arena_fd
        self._arena_size = arena_size
        self._watch = watch
        self._done = done
        self._guests: set[HostLink] = set()
        self._readers: dict[int, tuple[HostLink, dict[int, None]]] = {}  # with the tags of what they were offered
        self._dead: set[int] = set()
        watch.add(listener.fileno(), lambda event: self._accept())

    def send(self, node: int, tag: int, offset: int, size: int) -> bool:
        """Offer these bytes to `node`; False when it has no connection to us."""
        reader = self._readers.get(node)
        if reader is None:
            return False
        link, tags = reader
        tags[tag] = None
        self.flying += 1
        link.rows.append((OFFER.pack(tag, offset, size), None))
        if not link.blocked:
            self._flush(link)
        return True

    def forget(self, node: int, why: str) -> None:
        """`node` is dead: what it was offered ends with this error, and it cannot come back."""
        self._dead.add(node)
        for link in [link for link in self._guests if link.node == node]:
            self._lose(link, why)
        if node in self._readers:
            self._lose(self._readers[node][0], why)

    def close(self) -> None:
        """Close everything, without reports."""
        self._watch.remove(self._listener.fileno())
        self._listener.close()
        for link in [*self._guests, *(link for link, _ in self._readers.values())]:
            link.close()
        self._guests.clear()
        self._readers.clear()
        self.flying = 0

    def _accept(self) -> None:
        while (accepted := self._listener.accept()) is not None:
            self._guests.add(HostLink(accepted[0], -1, self._watch, self._ready))

    def _ready(self, link: HostLink) -> None:
        try:
            for packet in link.packets():
                if link in self._guests:
                    self._welcome(link, packet)
                else:
                    self._acknowledged(link, packet)
        except (LinkError, OSError, struct.error) as error:
            self._lose(link, str(error))
            return
        if link.rows:
            self._flush(link)

    def _welcome(self, link: HostLink, packet: bytes) -> None:
        if link.node < 0:
            magic, node = HELLO.unpack(packet)
            if magic != MAGIC or node == self._node or node in self._dead or node in self._readers:
                raise LinkError(f"a connection that says it is of node {node}")
            link.node = node
            greeting = GREETING.pack(MAGIC, self._node, self._arena_size)
            socket.send_fds(link.sock, [greeting], [self._arena_fd])
        elif packet == READY and link.node not in self._readers:
            self._guests.remove(link)
            self._readers[link.node] = (link, {})
        else:
            raise LinkError(f"node {link.node} is not ready")

    def _acknowledged(self, link: HostLink, packet: bytes) -> None:
        node, tags = link.node, self._readers[link.node][1]
        for (tag,) in ACK.iter_unpack(packet):
            if tag not in tags:
                raise LinkError(f"node {node} acknowledges what it was not offered")
            del tags[tag]
            self.flying -= 1
            self._done.append(("sent", node, tag, None))

    def _flush(self, link: HostLink) -> None:
        try:
            link.flush(self._done)
        except OSError as error:
            self._lose(link, f"node {link.node} has closed the connection: {error}")

    def _lose(self, link: HostLink, why: str) -> None:
        """First the connection is closed: whoever still copies then finds no taker for its acknowledgement, and knows
        that the bytes may have been others'. Only after that may they become so."""
        link.close()
        if link in self._guests:
            self._guests.remove(link)
            return
        _, tags = self._readers.pop(link.node)
        self.flying -= len(tags)
        self._done += [("sent", link.node, tag, why) for tag in tags]
