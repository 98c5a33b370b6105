"""Unix sockets between the processes of one host, the processes at their other ends, and the wait for them."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic
from types import MappingProxyType
from typing import Protocol

from hpcray.common.ids import NIL_PROC, node_of, number_of, raylet_of
from hpcray.common.memory import PROCESS_ROOM, BufferPool
from hpcray.platform.sockets import SOCKET_BUFFER, bind_private, connect_private, is_same_user, send_pieces
from hpcray.protocol.frames import FrameError, FrameReader, pack
from hpcray.protocol.messages import Hello, Message, ProbeViaRaylet, encode

NO_NEIGHBORS: Mapping[int, str] = MappingProxyType({})
RECV = 1 << 18
"""Bytes that one read takes at most."""
_SPARES = 8
"""Descriptors that are kept for peers that connect when the user's code has taken all others."""


class PeerSocket:
    """One connected Unix socket. inbox: where the next bytes are received."""

    __slots__ = ("fd", "inbox", "proc", "reader", "sock", "unsent")

    def __init__(self, sock: socket.socket, proc: bytes | None, inbox: memoryview, pool: BufferPool) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        self.sock = sock
        self.fd = sock.fileno()
        self.proc = proc
        self.inbox = inbox
        self.reader = FrameReader(pool)
        self.unsent: list[bytes | memoryview] = []

    def cannot_write(self) -> None:
        """Drop what is unsent: the other end is gone. What that sent is still to be read; reading finds the end."""
        self.unsent.clear()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)  # whatever it was that failed: they see an end too


class Peer:
    """A process we write to: directly when it is of our host, through our raylet otherwise. route: to it, from `me`."""

    __slots__ = ("dead", "dirty", "functions", "link", "out", "proc", "route")

    def __init__(self, proc: bytes, link: PeerSocket, me: bytes) -> None:
        self.proc, self.link, self.route = proc, link, proc + me
        self.out: list[Message] = []
        self.dirty = False
        self.dead = False
        self.functions: set[bytes] = set()


def listen(session_dir: str, number: int) -> socket.socket:
    """The socket on which process `number` of this node takes connections of its peers."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bind_private(sock, f"{session_dir}/{number}.s")
    sock.listen(1024)
    sock.setblocking(False)
    return sock


def greet(sock: socket.socket, hello: Hello, me: bytes = NIL_PROC) -> None:
    """Send the first frame of a connection to a raylet."""
    sock.sendall(pack(raylet_of(0), me, encode([hello])))


# ------------------------------------------------------------ event descriptor


class EventDescriptor:
    """An eventfd that ends the sleep of a thread in an epoll.

    Attributes:
        fd: what the epoll reports. is_set: it has been set and not cleared since, so that to set it changes nothing.
    """

    def __init__(self, epoll: select.epoll) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.is_set = False
        epoll.register(self.fd, select.EPOLLIN)

    def set(self) -> None:
        """End this sleep, or the next one (safe anywhere, also in destructors: takes no lock)."""
        self.is_set = True
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Let the next one sleep: this one is awake."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        self.is_set = False

    def close(self) -> None:
        """Close it; it counts as set from now on."""
        self.is_set = True
        os.close(self.fd)


# ------------------------------------------------------------ peer links


class FrameWriter(Protocol):
    """The method of `FrameSlotClient` that the engine calls."""

    def share(self, dest: bytes, pieces: Sequence[bytes], size: int) -> bytes | None:
        """Write a frame into a slot. Returns the frame that is sent instead; None: there is no slot."""


class PeerLinks:
    """The connections of one process: one per peer of its host, one to its raylet for everything else.

    All methods want the lock of the process held.

    Args:
        me: our proc id.
        directories: where the sockets of processes are, by node: our own, and others of this host.
        raylet: the connected socket to our raylet, past its Welcome.
        listener: what `listen` made, when it had to exist before our raylet heard of us.
        peer_lost: called with a process whose connection has ended, and the reason.

    Attributes:
        epoll: reports links that have something to be read, or with something unsent that can be written to again.
        by_fd: the open links, by descriptor. raylet: the one to our raylet.
        peers: the processes that we have written to or heard of, by proc id; see `peer`.
        listener: where peers connect.
        frame_writers: write long frames to our raylet in another way, where there is one.
    """

    def __init__(
        self,
        me: bytes,
        directories: Mapping[int, str],
        raylet: socket.socket,
        listener: socket.socket | None = None,
        peer_lost: Callable[[bytes, str], None] = lambda proc, reason: None,
    ) -> None:
        self._me, self._dirs, self._peer_lost = me, dict(directories), peer_lost
        self._lost: set[int] = set()
        self.epoll = select.epoll()
        self.by_fd: dict[int, PeerSocket] = {}
        self.peers: dict[bytes, Peer] = {}
        self.frame_writers: list[FrameWriter] = []
        # `recv` would allocate RECV bytes each time: three system calls and two page faults, as malloc sees them. These
        # get memory as far as they are ever filled: a new worker does not touch all of them.
        self._inbox = memoryview(mmap.mmap(-1, RECV, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._long_frames = BufferPool(PROCESS_ROOM)
        self.raylet = self._add(raylet, raylet_of(node_of(me)))
        self.listener = listener or listen(self._dirs[node_of(me)], number_of(me))
        self._spare_fds: list[int] = []
        with contextlib.suppress(OSError):
            self._spare_fds += [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(_SPARES)]
        self.epoll.register(self.listener.fileno(), select.EPOLLIN)

    def peer(self, proc: bytes) -> Peer:
        """The peer record of a process, connecting when it is of our host."""
        found = self.peers.get(proc)
        if found is None:
            found = self.peers[proc] = Peer(proc, self._connect(proc), self._me)
            if found.link is self.raylet and number_of(proc) and node_of(proc) in self._dirs:
                # If it is for want of descriptors, it must not try to connect to us either.
                found.out.append(ProbeViaRaylet())
        return found

    def via_raylet(self, proc: bytes) -> Peer:
        """A peer record with which all goes through our raylet from now on."""
        found = self.peers[proc] = Peer(proc, self.raylet, self._me)
        return found

    def on_probe_via_raylet(self, proc: bytes) -> None:
        """Write through our raylet to a process of this host that can write to us through raylets only."""
        if proc not in self.peers:
            self.via_raylet(proc)

    def heard_from(self, link: PeerSocket, proc: bytes) -> None:
        """The first frame has come on a connection that a peer made.

        Raises:
            FrameError: that process may not connect to us.
        """
        if node_of(proc) in self._lost or number_of(proc) == 0:
            raise FrameError("a raylet, or a process of a node that is dead, does not connect to us")
        link.proc = proc
        self.peers.setdefault(proc, Peer(proc, link, self._me))

    def add_neighbor_raylet(self, sock: socket.socket, raylet: bytes) -> Peer:
        """Add a connection to another node's raylet, for `IoEngine.send_to` alone: `send` goes through our raylet."""
        return Peer(raylet, self._add(sock, raylet), self._me)

    def drop_neighbor_raylet(self, peer: Peer) -> None:
        """Close the connection that `add_neighbor_raylet` returned."""
        peer.out.clear()
        self._drop(peer.link)

    def drop_peer(self, proc: bytes) -> None:
        """Forget a process that is dead."""
        peer = self.peers.pop(proc, None)
        if peer is not None:
            peer.dead = True
            peer.out.clear()
            if peer.link is not self.raylet:
                self._drop(peer.link)

    def peers_of(self, node: int) -> list[bytes]:
        """The processes of a node that we have written to or heard of."""
        return [proc for proc in self.peers if node_of(proc) == node]

    def add_neighbors(self, directories: Mapping[int, str]) -> None:
        """Nodes of this host have joined the job: their processes are reached directly. Those that have begun to speak
        to this one through the raylets go on so."""
        for node, directory in directories.items():
            if node not in self._lost:
                self._dirs.setdefault(node, directory)

    def lose_node(self, node: int) -> None:
        """A node is dead, or the job goes on without it: its processes, if any live, are not heard any more."""
        self._dirs.pop(node, None)
        self._lost.add(node)
        for link in list(self.by_fd.values()):
            if link.proc is not None and node_of(link.proc) == node and link is not self.raylet:
                self._drop(link)

    def _connect(self, proc: bytes) -> PeerSocket:
        directory = self._dirs.get(node_of(proc))
        if directory is None or number_of(proc) == 0:
            return self.raylet
        # Without a connection of our own (it is dead, or we are out of descriptors) our raylet passes frames on, or
        # reports how it died.
        try:
            sock = connect_private(f"{directory}/{number_of(proc)}.s")
        except OSError:
            return self.raylet
        return self._add(sock, proc)

    def accept(self) -> bool:
        """Take all that connect; False when the process is out of descriptors."""
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    return True
                if not self._spare_fds:
                    return False
                os.close(self._spare_fds.pop())  # the user's code has all descriptors but these
                continue
            if is_same_user(sock):
                self._add(sock, None)
            else:
                sock.close()

    def gather(self, link: PeerSocket, size: int) -> Iterable[memoryview]:
        """The frames that are complete, with `size` bytes more in the inbox of the link."""
        reader = link.reader
        if reader.vacancy is None:
            frames = list(reader.feed(bytes(link.inbox[:size])))
        else:
            whole = reader.filled(size)
            frames = [] if whole is None else [whole]
        link.inbox = self._inbox if reader.vacancy is None else reader.vacancy
        return frames

    def keep_rest(self, link: PeerSocket, frame: bytes, sent: int) -> None:
        """Write what is left of a frame when the kernel takes it."""
        link.unsent.append(memoryview(frame)[sent:])
        self.epoll.modify(link.fd, select.EPOLLIN | select.EPOLLOUT)

    def write_rest(self, link: PeerSocket) -> None:
        """Write what is unsent, as far as the kernel takes it."""
        try:
            if not send_pieces(link.sock, link.unsent, SOCKET_BUFFER):
                return
        except OSError:
            link.cannot_write()
            return
        self.epoll.modify(link.fd, select.EPOLLIN)

    def write_all(self, patience: float) -> None:
        """Write out what the kernel would not take yet, for at most `patience` seconds: this process ends."""
        until = monotonic() + patience
        for link in list(self.by_fd.values()):
            poll = select.poll()
            poll.register(link.fd, select.POLLOUT)
            while link.unsent and link.fd in self.by_fd and (left := until - monotonic()) > 0:
                poll.poll(1000 * left)
                self.write_rest(link)

    def _add(self, sock: socket.socket, proc: bytes | None) -> PeerSocket:
        link = PeerSocket(sock, proc, self._inbox, self._long_frames)
        self.by_fd[link.fd] = link
        self.epoll.register(link.fd, select.EPOLLIN)
        return link

    def end(self, link: PeerSocket, reason: str) -> None:
        """Close a link whose other end has gone, or cannot be understood."""
        if self._drop(link) and link.proc is not None:
            peer = self.peers.get(link.proc)
            if number_of(link.proc) == 0 and link is not self.raylet:
                self._peer_lost(link.proc, reason)  # of a visit; we may speak to that raylet through ours as well
            elif peer is None or peer.link is link or link is self.raylet:
                self.peers.pop(link.proc, None)
                self._peer_lost(link.proc, reason)

    def _drop(self, link: PeerSocket) -> bool:
        """Close it; False when it was closed before: its descriptor may be that of another by now."""
        if self.by_fd.get(link.fd) is not link:
            return False
        del self.by_fd[link.fd]
        with contextlib.suppress(OSError):
            self.epoll.unregister(link.fd)
        link.sock.close()
        return True

    def close_after_fork(self) -> None:
        """Close the copies of a child that user code forked: else our peers would not see us end before it does."""
        for link in self.by_fd.values():
            link.sock.close()
        self.listener.close()

    def close(self) -> None:
        """Close every socket, and the epoll."""
        self.close_after_fork()
        self.by_fd.clear()
        for fd in self._spare_fds:
            os.close(fd)
        self._spare_fds.clear()
        with contextlib.suppress(OSError):
            os.unlink(f"{self._dirs[node_of(self._me)]}/{number_of(self._me)}.s")
        self.epoll.close()
