"""The connections between the raylets of one host, over which they say what may be copied out of whose arena.

Who receives connects to who sends. Each message is one packet, which the socket keeps whole::

    receiver   HELLO     who it is
    sender     GREETING  who it is and how large its arena is; the arena's descriptor beside it (SCM_RIGHTS)
    receiver   READY     the arena is mapped: from now on all transfers to it are offered here
    sender     OFFERs    tag, offset, size: these bytes are there, and stay until acknowledged
    receiver   ACKs      tag: copied, or not wanted
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Callable, Iterator

from hpcray.transport.base import Report

DATA_SOCKET = "d.s"
HELLO = struct.Struct("<8sI")
GREETING = struct.Struct("<8sIQ")
MAGIC = b"hpcray/1"
READY = b"ready"
OFFER = struct.Struct("<QQQ")
ACK = struct.Struct("<Q")

_BATCH = 512
_PACKET = _BATCH * OFFER.size
_PACKETS = 64


class LinkError(Exception):
    """The other end has closed the connection, or says what it should not; why."""


class Watch:
    """Descriptors and what is called when they are ready: one epoll, which is itself a descriptor to sleep on."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._calls: dict[int, Callable[[int], None]] = {}

    def fileno(self) -> int:
        """Readable while a call is due."""
        return self._epoll.fileno()

    def add(self, fd: int, call: Callable[[int], None]) -> None:
        """Call `call(event)` whenever `fd` is readable."""
        self._calls[fd] = call
        self._epoll.register(fd, select.EPOLLIN)

    def writable(self, fd: int, on: bool) -> None:
        """Whether `call` is due too when `fd` is writable."""
        self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if on else 0))

    def remove(self, fd: int) -> None:
        """Before it is closed."""
        del self._calls[fd]
        self._epoll.unregister(fd)

    def look(self) -> None:
        """Make the calls that are due."""
        for fd, event in self._epoll.poll(0):
            call = self._calls.get(fd)
            if call is not None:
                call(event)

    def close(self) -> None:
        """What is still watched is the caller's to close."""
        self._calls.clear()
        self._epoll.close()


class HostLink:
    """One connection to the raylet of another node.

    Args:
        sock: connected.
        ready: called with this link when something may have come, or can be written.

    Attributes:
        node: the other one's number; -1 until known.
        rows: what is still to be sent, each with the report that is due when it is.
        blocked: the other end has not read what was sent; the rest waits for that.
    """

    def __init__(self, sock: socket.socket, node: int, watch: Watch, ready: Callable[[HostLink], None]) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.node = node
        self.rows: list[tuple[bytes, Report | None]] = []
        self._watch = watch
        self.blocked = False
        watch.add(sock.fileno(), lambda event: ready(self))

    def packets(self) -> Iterator[bytes]:
        """What has come.

        Raises:
            LinkError: the other end has closed the connection.
            OSError: likewise.
        """
        for _ in range(_PACKETS):
            try:
                packet = self.sock.recv(_PACKET)
            except BlockingIOError:
                return
            if not packet:
                raise LinkError(f"node {self.node} has closed the connection")
            yield packet

    def flush(self, written: list[Report]) -> None:
        """Send what waits, as far as there is room now.

        Args:
            written: gets the reports of what was sent.

        Raises:
            OSError: nobody is there any more.
        """
        rows, room = self.rows, True
        while rows and room:
            some = rows[:_BATCH]
            try:
                self.sock.send(b"".join([row for row, _ in some]), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                room = False
            else:
                del rows[:_BATCH]
                written += [report for _, report in some if report is not None]
        if self.blocked is room:
            self.blocked = not room
            self._watch.writable(self.sock.fileno(), not room)

    def close(self) -> None:
        """Close the connection: from here on nothing that the other end writes is taken for an answer."""
        self._watch.remove(self.sock.fileno())
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # a child that is being started may still have a copy of it
        self.sock.close()
