"""The loop of a raylet: one thread, one epoll over sockets, wires and descriptors. It moves frames; `Events` decides.

One turn: sleep, read what is readable, poll the wires, run timers, flush every output once. Nothing in it blocks: what
a slow reader does not take waits in that reader's list.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import select
import struct
from collections.abc import Callable
from time import monotonic
from typing import Protocol

import msgspec

from hpcray.base.ids import HEAD, NIL_PROC
from hpcray.runtime.local_links import GUEST, RECEIVE, Link, Listener
from hpcray.runtime.router import Router
from hpcray.transport.base import FOREVER, ControlTransport, DataPlane
from hpcray.wire.frames import FrameError
from hpcray.wire.messages import Hello, Message, decode

_LENGTH = struct.Struct("<I")


class Events(Protocol):
    """What the loop tells its raylet."""

    def hello(self, link: Link, hello: Hello) -> None:
        """A new connection has said who it is."""

    def messages(self, src: bytes, messages: list[Message]) -> None:
        """Messages for this raylet."""

    def link_closed(self, link: Link, reason: str) -> None:
        """A process that had said Hello closed its connection, or broke the protocol."""

    def transfer_ended(self, what: str, tag: int, error: str | None) -> None:
        """A "received" or "sent" report of the data plane."""

    def node_lost(self, node: int, reason: str) -> None:
        """The wire itself found a node dead."""


class RayletLoop:
    """Runs until `stop`.

    Attributes:
        now: monotonic time of the current turn.
        heard: when anything of another node arrived last.
        each_turn: called in each turn, when all that came is dealt with.
    """

    def __init__(
        self, router: Router, listener: Listener, control: ControlTransport | None, data: DataPlane | None
    ) -> None:
        self.now = monotonic()
        self.heard: dict[int, float] = {}
        self.each_turn: list[Callable[[], None]] = []
        self._router = router
        self._listener = listener
        self._control = control
        self._data = data
        self._epoll = select.epoll()
        self._calls: dict[int, Callable[[int], None]] = {}
        self._links: dict[int, Link] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_count = 0
        self._running = True
        self._events: Events
        self.watch(listener.fileno(), lambda event: self._accept())
        if control is not None and (fd := control.fileno()) is not None:
            self.watch(fd, lambda event: None)

    # ------------------------------------------------------------ for the raylet

    def watch(self, fd: int, call: Callable[[int], None]) -> None:
        """Call `call(event)` whenever `fd` is readable."""
        self._calls[fd] = call
        self._epoll.register(fd, select.EPOLLIN)

    def watch_writable(self, fd: int, on: bool) -> None:
        """Whether `call` is to be called too when `fd` is writable."""
        self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if on else 0))

    def unwatch(self, fd: int) -> None:
        """Forget `fd`; before it is closed."""
        if self._calls.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        """Call once at monotonic time `when`, or a little later."""
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, call))

    def run(self, events: Events) -> None:
        """Turn until `stop`."""
        self._events = events
        sleep = 0.0
        while self._running:
            self._turn(sleep)
            sleep = self._sleep()

    def stop(self) -> None:
        """Leave `run` at the end of this turn, its outputs flushed."""
        self._running = False

    def drain(self, link: Link) -> None:
        """Take what a dead process had still sent. Its socket cannot tell: a child of it may hold it open."""
        while link.fd in self._links and self._read(link):
            pass

    def close_link(self, link: Link) -> None:
        """Close a connection without telling the raylet."""
        if self._links.pop(link.fd, None) is not None:
            self.unwatch(link.fd)
            link.sock.close()

    def close(self) -> None:
        """Close the connections and the listening socket."""
        for link in list(self._links.values()):
            self.close_link(link)
        self.unwatch(self._listener.fileno())
        self._listener.close()
        self._epoll.close()

    # ------------------------------------------------------------ one turn

    def _turn(self, sleep: float) -> None:
        calls = self._calls
        ready = self._epoll.poll(sleep)
        self.now = monotonic()
        for fd, event in ready:
            call = calls.get(fd)
            if call is not None:
                call(event)
        if self._control is not None:
            if ready:
                self._flush()  # the wires take their time
            self._poll_wires(self._control)
        while self._timers and self._timers[0][0] <= self.now:
            heapq.heappop(self._timers)[2]()
        router = self._router
        if router.overdue:
            self._read_overdue()
        while router.inbox:
            inbox, router.inbox = router.inbox, []
            self._events.messages(router.me, inbox)
        for tell in self.each_turn:
            tell()
        self._flush()

    def _flush(self) -> None:
        router = self._router
        # Those of this node first: what one of them will do at another's word (push a task to a worker that it was
        # granted) may come to that one on a shorter way than ours (the job's sys.path).
        router.encode()
        dirty = router.dirty
        if dirty:
            router.dirty = []
            for link in dirty:
                if not link.blocked and link.fd in self._links:
                    self._write(link)
        for node, reason in router.flush():
            self._events.node_lost(node, reason)

    def _sleep(self) -> float:
        router = self._router
        if router.inbox or router.dirty or router.overdue:
            return 0.0
        sleep = self._timers[0][0] - self.now if self._timers else FOREVER
        control, data = self._control, self._data
        if control is not None:
            sleep = min(sleep, control.patience())
            if data is not None:
                sleep = min(sleep, data.patience())
            if sleep > 0.0 and not control.arm():
                return 0.0
            if data is not None and data.busy():  # arming may have moved what nobody will wake us for
                sleep = min(sleep, data.patience())
        return max(0.0, sleep) if sleep < FOREVER else -1.0

    def _poll_wires(self, control: ControlTransport) -> None:
        came = False
        for node, batch in control.poll():
            if node not in self._router.lost_nodes:  # who was declared dead stays dead
                self.heard[node] = self.now
                self._read_batch(node, batch)
                came = True
        if came:
            self._flush()  # to those who wait for it, before we look for more
        if self._data is not None:
            for what, _, tag, error in self._data.progress():
                self._events.transfer_ended(what, tag, error)
        for node, reason in control.lost():
            self._events.node_lost(node, reason)

    def _read_overdue(self) -> None:
        """What processes of this node wrote to the head before this raylet became it."""
        overdue, self._router.overdue = self._router.overdue, []
        for src, frame in overdue:
            self._events.messages(src, decode(frame[20:]))

    def _read_batch(self, node: int, batch: bytes) -> None:
        """Frames from another node, in one message."""
        mine = self._router.mine
        view = memoryview(batch)
        pos, end = 0, len(batch)
        while pos < end:
            stop = pos + 4 + _LENGTH.unpack_from(batch, pos)[0]
            dest = batch[pos + 4 : pos + 12]
            src = batch[pos + 12 : pos + 20]
            if dest in mine:
                if dest == HEAD:
                    self._router.to_head.arrived(node)
                self._events.messages(src, decode(view[pos + 20 : stop]))
            else:
                self._router.forward(dest, src, view[pos:stop])
            pos = stop

    # ------------------------------------------------------------ links

    def _accept(self) -> None:
        while (accepted := self._listener.accept()) is not None:
            sock, pid = accepted
            link = Link(sock, NIL_PROC, pid)
            self._links[link.fd] = link
            self.watch(link.fd, functools.partial(self._link_ready, link))

    def _link_ready(self, link: Link, event: int) -> None:
        if event & select.EPOLLOUT:
            self._write(link)
        if event & ~select.EPOLLOUT and link.fd in self._links:
            self._read(link)

    def _read(self, link: Link) -> bool:
        """Read once; False when nothing came."""
        try:
            data = link.sock.recv(RECEIVE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._lose(link, "its connection closed")
            return False
        router = self._router
        mine, peers = router.mine, link.peers
        try:
            for frame in link.reader.feed(data):
                dest = bytes(frame[4:12])
                if not link.kind:
                    self._greet(link, frame)
                    if self._links.get(link.fd) is not link:
                        return False  # turned away, with all that it has sent
                elif dest in mine:
                    self._events.messages(bytes(frame[12:20]), decode(frame[20:]))
                else:
                    peers.add(dest)
                    router.forward(dest, link.proc, frame)
        except (FrameError, msgspec.MsgspecError) as error:
            self._lose(link, f"it sent what is not a message: {error}")
            return False
        return True

    def _greet(self, link: Link, frame: memoryview) -> None:
        (hello,) = decode(frame[20:])
        if not isinstance(hello, Hello):
            raise FrameError(f"the first message is {type(hello).__name__}, not Hello")
        link.kind = hello.kind
        if link.kind == GUEST:
            link.proc = bytes(frame[12:20])
        self._events.hello(link, hello)

    def _write(self, link: Link) -> None:
        try:
            done = link.flush()
        except OSError:
            # What it sent before it went is still to be read; reading will find the end.
            link.out = []
            done = True
        if link.blocked is done:
            link.blocked = not done
            with contextlib.suppress(OSError):
                self.watch_writable(link.fd, not done)

    def _lose(self, link: Link, reason: str) -> None:
        self.close_link(link)
        if link.kind:
            self._events.link_closed(link, reason)
