"""The sockets of a driver or worker: one per peer of its host, one to its raylet for everything else.

Outgoing messages are buffered per peer and encoded as one frame by `flush`. All methods want the engine's lock held.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from hpcray.base.ids import NIL_PROC, node_of, number_of, raylet_of
from hpcray.host.peers import bind_private, connect_private, is_ours
from hpcray.wire.frames import HEADER, LENGTH, ROUTE, FrameError, FrameReader, pack
from hpcray.wire.messages import Hello, Knock, Message, decode, encode

RECV = 1 << 18
SOCKET_BUFFER = 4 << 20
MAX_BATCH = 64
NOBODY: Mapping[int, str] = MappingProxyType({})
_SPARES = 8
"""Descriptors that are kept for peers that connect when the user's code has taken all others."""


class Link:
    """One connected Unix socket."""

    __slots__ = ("fd", "proc", "reader", "sock", "unsent")

    def __init__(self, sock: socket.socket, proc: bytes | None) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        self.sock = sock
        self.fd = sock.fileno()
        self.proc = proc
        self.reader = FrameReader()
        self.unsent: list[bytes | memoryview] = []


class Peer:
    """A process we write to: directly when it is of our host, through our raylet otherwise. route: to it, from `me`."""

    __slots__ = ("dead", "dirty", "functions", "link", "out", "proc", "route")

    def __init__(self, proc: bytes, link: Link, me: bytes) -> None:
        self.proc, self.link, self.route = proc, link, proc + me
        self.out: list[Message] = []
        self.dirty = False
        self.dead = False
        self.functions: set[bytes] = set()


class Links:
    """What the engine drives.

    Args:
        me: our proc id.
        session_dir: where the sockets of our node's processes are.
        neighbours: the same of other nodes of this host, by node.

    Attributes:
        lock: guards everything in here, and the tables of the process.
        nested: whether this thread holds the lock already: a destructor or a signal handler that interrupted us asks.
        after: calls to be made as soon as the lock is free.
        peers: the processes that we have written to or heard of, by proc id; see `peer`.
        dirty: those with something to send.
    """

    def __init__(self, me: bytes, session_dir: str, neighbours: Mapping[int, str] = NOBODY) -> None:
        self.me = me
        self.lock = threading.RLock()
        self.nested: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]
        self.after: list[Callable[[], object]] = []
        self.dirty: list[Peer] = []
        self._my_node = node_of(me)
        self._dirs = {**neighbours, self._my_node: session_dir}
        self._lost: set[int] = set()
        self._handlers: dict[type, Callable[[bytes, Any], None]] = {}
        self._peer_lost: Callable[[bytes, str], None] = lambda proc, reason: None
        self._epoll = select.epoll()
        self._links: dict[int, Link] = {}
        # `recv` would allocate RECV bytes each time: three system calls and two page faults, as malloc sees them. These
        # get memory as far as they are ever filled: a new worker does not touch all of them.
        self._inbox = memoryview(mmap.mmap(-1, RECV, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._writing = False
        self.peers: dict[bytes, Peer] = {}
        self._listener: socket.socket
        self._spare: list[int] = []
        self._raylet: Link

    def _open(self, raylet: socket.socket, listener: socket.socket | None) -> None:
        self._raylet = self._add_link(raylet, raylet_of(self._my_node))
        self._listener = listener or listen(self._dirs[self._my_node], number_of(self.me))
        with contextlib.suppress(OSError):
            self._spare += [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(_SPARES)]
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)

    # ------------------------------------------------------------ sending

    def peer(self, proc: bytes) -> Peer:
        """The peer record of a process, connecting when it is of our host."""
        found = self.peers.get(proc)
        if found is None:
            found = self.peers[proc] = Peer(proc, self._connect(proc), self.me)
            if found.link is self._raylet and number_of(proc) and node_of(proc) in self._dirs:
                # If it is for want of descriptors, it must not try to connect to us either.
                found.out.append(Knock())
        return found

    def knocked(self, proc: bytes) -> None:
        """A process of this host can or will write to us through raylets only: so do we, unless we are connected."""
        if proc not in self.peers:
            self.peers[proc] = Peer(proc, self._raylet, self.me)

    def send(self, proc: bytes, msg: Message) -> None:
        """Queue a message; it leaves at the next flush."""
        peer = self.peers.get(proc) or self.peer(proc)
        peer.out.append(msg)
        if not peer.dirty:
            peer.dirty = True
            self.dirty.append(peer)

    def visit(self, sock: socket.socket, raylet: bytes) -> Peer:
        """A connection to another node's raylet, for `tell` alone: what is sent to it otherwise goes through ours."""
        return Peer(raylet, self._add_link(sock, raylet), self.me)

    def end_visit(self, peer: Peer) -> None:
        """Close it."""
        peer.out.clear()
        self._drop_link(peer.link)

    def tell(self, peer: Peer, msg: Message) -> None:
        """As `send`, which is too busy to call this one."""
        peer.out.append(msg)
        if not peer.dirty:
            peer.dirty = True
            self.dirty.append(peer)

    def flush(self) -> None:
        """Write out what is queued."""
        while self.dirty and not self._writing:
            fresh: list[Peer] = []  # made first: nothing may come between the halves of the swap
            dirty, self.dirty = self.dirty, fresh
            for peer in dirty:
                self.flush_peer(peer)

    def flush_peer(self, peer: Peer) -> None:
        """Write out what is queued for one peer."""
        if self._writing:
            return  # a destructor calls, in the middle of a write; it stays dirty, and `flush` goes on with it
        peer.dirty = False
        if peer.out:
            self._writing = True
            try:
                fresh: list[Message] = []
                out, peer.out = peer.out, fresh
                body = encode(out)
                size = len(body) + ROUTE
                frame = LENGTH.pack(size) + peer.route + body
                link = peer.link
                # What the kernel does not take at once goes to `unsent`; so does all that comes after it.
                if link.unsent:
                    link.unsent.append(frame)
                elif (sent := link.sock.send(frame)) < size + 4:
                    self._keep_rest(link, frame, sent)
            except BlockingIOError:
                self._keep_rest(link, frame, 0)
            except OSError:
                self._cannot_write(link)
            finally:
                self._writing = False

    def _keep_rest(self, link: Link, frame: bytes, sent: int) -> None:
        link.unsent.append(memoryview(frame)[sent:])
        self._epoll.modify(link.fd, select.EPOLLIN | select.EPOLLOUT)

    @staticmethod
    def _cannot_write(link: Link) -> None:
        """Its other end is gone. What it sent before it went is still to be read; reading finds the end."""
        link.unsent.clear()
        with contextlib.suppress(OSError):
            link.sock.shutdown(socket.SHUT_WR)  # whatever it was that failed: they see an end too

    def knock(self, proc: bytes) -> None:
        """The connection to a process of another node has ended: from now on all goes through our raylet, which will
        hear how it died. If it lives, nothing is lost but what was on that connection."""
        self.peers[proc] = Peer(proc, self._raylet, self.me)
        self.send(proc, Knock())

    def peers_of(self, node: int) -> list[bytes]:
        """The processes of a node that we have written to or heard of."""
        return [proc for proc in self.peers if node_of(proc) == node]

    # ------------------------------------------------------------ reading and writing

    def read_rest(self, proc: bytes) -> None:
        """Handle all that a process has written straight to us by now: somebody tells us that it is dead."""
        for link in [link for link in self._links.values() if link.proc == proc]:
            while self._links.get(link.fd) is link and self._read(link):
                pass

    def write_rest(self, patience: float) -> None:
        """Write out what the kernel would not take yet, for at most `patience` seconds: this process ends."""
        until = time.monotonic() + patience
        for link in list(self._links.values()):
            poll = select.poll()
            poll.register(link.fd, select.POLLOUT)
            while link.unsent and link.fd in self._links and (left := until - time.monotonic()) > 0:
                poll.poll(1000 * left)
                self._write_rest(link)

    def _read(self, link: Link) -> bool:
        """Handle what a link holds; False when there was nothing, or it has ended."""
        inbox = self._inbox
        try:
            size = link.sock.recv_into(inbox)
        except BlockingIOError:
            return False
        except OSError:
            size = 0
        if not size:
            self._unlink(link, "its connection ended")
            return False
        handlers = self._handlers
        frames: Iterable[memoryview]
        try:
            if size >= HEADER and not link.reader.held and LENGTH.unpack_from(inbox)[0] + 4 == size:
                frames = (inbox[:size],)  # just one, as a rule: it is decoded where it is
            else:
                frames = link.reader.feed(bytes(inbox[:size]))
            for frame in frames:
                src = bytes(frame[12:20])
                if link.proc is None:
                    if node_of(src) in self._lost or number_of(src) == 0:
                        raise FrameError("a raylet, or a process of a node that is dead, does not connect to us")
                    link.proc = src
                    if src not in self.peers:
                        self.peers[src] = Peer(src, link, self.me)
                for msg in decode(frame[20:]):
                    try:
                        handlers[type(msg)](src, msg)
                    except Exception:
                        # A defect of ours. It must not cost the messages behind this one, whose senders wait for us.
                        traceback.print_exc()
        except (FrameError, msgspec.MsgspecError) as error:
            self._unlink(link, f"it sent what is not a message: {error}")
            return False
        return True

    def _write_rest(self, link: Link) -> None:
        unsent = link.unsent
        while unsent:
            count = size = 0
            for piece in unsent:
                count += 1
                size += len(piece)
                if size >= SOCKET_BUFFER:
                    break
            data = unsent[0] if count == 1 else b"".join(unsent[:count])
            try:
                sent = link.sock.send(data)
            except BlockingIOError:
                return
            except OSError:
                self._cannot_write(link)
                return
            unsent[:count] = [memoryview(data)[sent:]] if sent < size else []
            if sent < size:
                return
        self._epoll.modify(link.fd, select.EPOLLIN)

    # ------------------------------------------------------------ links

    def _add_link(self, sock: socket.socket, proc: bytes | None) -> Link:
        link = Link(sock, proc)
        self._links[link.fd] = link
        self._epoll.register(link.fd, select.EPOLLIN)
        return link

    def _connect(self, proc: bytes) -> Link:
        directory = self._dirs.get(node_of(proc))
        if directory is None or number_of(proc) == 0:
            return self._raylet
        # Without a connection of our own (it is dead, or we are out of descriptors) our raylet passes frames on, or
        # tells how it died.
        try:
            sock = connect_private(f"{directory}/{number_of(proc)}.s")
        except OSError:
            return self._raylet
        return self._add_link(sock, proc)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    if self._spare:
                        os.close(self._spare.pop())  # the user's code has all descriptors but these
                        continue
                    self._pause_listening()
                return
            if not is_ours(sock):
                sock.close()
                continue
            self._add_link(sock, None)

    def _pause_listening(self) -> None:
        """No descriptor is left at all: whoever connects has to wait."""

    def _unlink(self, link: Link, reason: str) -> None:
        if self._drop_link(link) and link.proc is not None:
            peer = self.peers.get(link.proc)
            if number_of(link.proc) == 0 and link is not self._raylet:
                self._peer_lost(link.proc, reason)  # of a visit; we may speak to that raylet through ours as well
            elif peer is None or peer.link is link or link is self._raylet:
                self.peers.pop(link.proc, None)
                self._peer_lost(link.proc, reason)

    def drop_peer(self, proc: bytes) -> None:
        """Forget a process that is dead (lock held)."""
        peer = self.peers.pop(proc, None)
        if peer is not None:
            peer.dead = True
            peer.out.clear()
            if peer.link is not self._raylet:
                self._drop_link(peer.link)

    def lose_node(self, node: int) -> None:
        """A node is dead, or the job goes on without it: its processes, if any live, are not heard any more."""
        self._dirs.pop(node, None)
        self._lost.add(node)
        for link in list(self._links.values()):
            if link.proc is not None and node_of(link.proc) == node and link is not self._raylet:
                self._drop_link(link)

    def _drop_link(self, link: Link) -> bool:
        """Close it; False when it was closed before: its descriptor may be that of another by now."""
        if self._links.get(link.fd) is not link:
            return False
        del self._links[link.fd]
        with contextlib.suppress(OSError):
            self._epoll.unregister(link.fd)
        link.sock.close()
        return True

    def let_go(self) -> None:
        """In a child that the user forked: close its copies, or nobody would see us end before it does."""
        for link in self._links.values():
            link.sock.close()
        self._listener.close()

    def _close_links(self) -> None:
        for link in self._links.values():
            link.sock.close()
        self._links.clear()
        self._listener.close()
        for fd in self._spare:
            os.close(fd)
        self._spare.clear()
        with contextlib.suppress(OSError):
            os.unlink(f"{self._dirs[self._my_node]}/{number_of(self.me)}.s")
        self._epoll.close()


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
