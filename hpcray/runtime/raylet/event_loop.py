"""The loop of a raylet: one thread, one epoll over sockets, transports and descriptors. It moves frames; an
`EventHandler` handles them.

One turn: sleep, read what is readable, poll the transports, run timers, flush every output once. Nothing in it blocks:
frames that a slow reader does not take wait in the list of its link.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import os
import select
import struct
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Protocol

import msgspec

from hpcray.common.ids import HEAD, NIL_PROC
from hpcray.common.memory import BufferPool, keep_freed_memory
from hpcray.platform.busy_poll import BusyPoll
from hpcray.protocol.frames import LONG, FrameError
from hpcray.protocol.messages import GUEST, Hello, Message, decode
from hpcray.runtime.raylet.local_sockets import RECEIVE, LocalListener, LocalSocket
from hpcray.runtime.raylet.router import Router
from hpcray.transport.base import FOREVER, ControlTransport, DataPlane, Received

_LENGTH = struct.Struct("<I")
_CLOSED: list[memoryview] = []
_MOST_ROUNDS = 100
"""Rounds of messages of this raylet to itself in one turn. On the head the GCS and the local lease manager send each
other messages in this way: if they did so without end, other nodes and timers would still get their turn."""
_CPUS_TO_SPIN = 4
"""With fewer, what this raylet waits for needs the one on which it would poll."""


class EventHandler(Protocol):
    """The methods of its raylet that the loop calls."""

    def hello(self, link: LocalSocket, hello: Hello) -> None:
        """Handle the first message of a new connection."""

    def messages(self, src: bytes, messages: list[Message]) -> None:
        """Handle messages for this raylet."""

    def long_frame_sent(self, proc: bytes) -> None:
        """A process of this node has sent a long frame to another node through its socket."""

    def link_closed(self, link: LocalSocket, reason: str) -> None:
        """A process closed its connection after its Hello, or violated the protocol."""

    def transfer_ended(self, what: str, tag: int, error: str | None) -> None:
        """Handle a "received" or "sent" report of the data plane."""

    def node_lost(self, node: int, reason: str) -> None:
        """The transport found a node dead."""


class FrameSharing(Protocol):
    """The methods of `FrameSlotRouter` that the loop calls."""

    def offset_of(self, batch: Received) -> int:
        """Return where in shared memory a message lies; -1 elsewhere."""

    def deliver(self, dest: bytes, src: bytes, frame: memoryview, offset: int) -> bool:
        """Have a process read a frame there; False where it cannot."""


class EventLoop:
    """Reads, dispatches and writes until `stop`.

    Args:
        spin: see `Config.spin`.

    Attributes:
        now: monotonic time of the current turn.
        last_heard: when the last message, or part of an object, of each other node arrived.
        each_turn: called at the end of each turn, when all that arrived is handled.
    """

    def __init__(
        self,
        router: Router,
        listener: LocalListener,
        control: ControlTransport | None,
        data: DataPlane | None,
        spin: float = 0.0,
    ) -> None:
        self.now = monotonic()
        self.last_heard: dict[int, float] = {}
        self.each_turn: list[Callable[[], None]] = []
        self._router = router
        self._listener = listener
        self._control = control
        self._data = data
        self._epoll = select.epoll()
        spins = len(os.sched_getaffinity(0)) >= _CPUS_TO_SPIN
        self._wait = BusyPoll(self._epoll, spin).poll if spins else self._epoll.poll
        self._calls: dict[int, Callable[[int], None]] = {}
        self._links: dict[int, LocalSocket] = {}
        keep_freed_memory()
        self._long_frames = BufferPool()
        self._timers: list[tuple[float, int, Callable[[], None], float]] = []
        self._timer_count = 0
        self._wake_at = FOREVER
        self._running = True
        self._events: EventHandler
        self._sharing: FrameSharing | None = None
        self.listen_at("")
        if control is not None:
            self._watch_wire(control)

    # ------------------------------------------------------------ for the raylet

    def attach(self, control: ControlTransport, data: DataPlane) -> None:
        """Use these wires from now on."""
        self._control, self._data = control, data
        self._watch_wire(control)

    def share_frames(self, sharing: FrameSharing) -> None:
        """Have processes read long frames of other nodes where the wire has put them."""
        self._sharing = sharing

    def _watch_wire(self, control: ControlTransport) -> None:
        fd = control.fileno()
        if fd is not None and fd not in self._calls:
            self.watch(fd, lambda event: None)

    def watch(self, fd: int, call: Callable[[int], None]) -> None:
        """Call `call(event)` whenever `fd` is readable."""
        self._calls[fd] = call
        self._epoll.register(fd, select.EPOLLIN)

    def watch_writable(self, fd: int, on: bool) -> None:
        """Call `call` also when `fd` is writable, or no longer."""
        self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if on else 0))

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`; before it is closed."""
        if self._calls.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_at(self, when: float, call: Callable[[], None], slack: float = 0.0) -> None:
        """Call once at monotonic time `when`, or a little later.

        Args:
            slack: the loop does not wake up for this call alone before so many seconds have passed after `when`; what
                wakes it in between makes the call too. Periodic work that all has slack gathers in few wake-ups.
        """
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, call, slack))
        self._wake_at = min(self._wake_at, when + slack)

    def run(self, events: EventHandler) -> None:
        """Run until `stop`."""
        self._events = events
        sleep = 0.0
        while self._running:
            self._turn(sleep)
            sleep = self._sleep()

    def listen_at(self, path: str) -> None:
        """Accept connections, at a path where the socket was removed; "": where the listener is.

        Raises:
            OSError: no socket can be made there.
        """
        if path:
            self._accept()  # those that have connected in time
            before = self._listener.fileno()
            self._listener.move(path)
            self._calls.pop(before)  # closed, and so no longer watched
        self.watch(self._listener.fileno(), lambda event: self._accept())

    def stop(self) -> None:
        """Leave `run` at the end of this turn, its outputs flushed."""
        self._running = False

    def drain(self, link: LocalSocket) -> None:
        """Read the last frames of a dead process; a child of it may hold its socket open."""
        while link.fd in self._links and self._read(link):
            pass

    def close_link(self, link: LocalSocket) -> None:
        """Close a connection without calling `link_closed`."""
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
        ready = self._wait(sleep)
        self.now = monotonic()
        for fd, event in ready:
            call = calls.get(fd)
            if call is not None:
                call(event)
        if self._control is not None:
            if ready:
                self._flush()  # polling the transports takes a while
            self._poll_transports(self._control)
        if self._timers and self._timers[0][0] <= self.now:
            self._run_timers()
        if self._router.deferred_to_head:
            self._read_deferred_to_head()
        if self._router.inbox:
            self._read_own_messages()
        for turn_ended in self.each_turn:
            turn_ended()
        self._flush()

    def _run_timers(self) -> None:
        timers = self._timers
        while timers and timers[0][0] <= self.now:
            heapq.heappop(timers)[2]()
        self._wake_at = min((when + slack for when, _, _, slack in timers), default=FOREVER)

    def _read_own_messages(self) -> None:
        """Handle what this raylet has sent itself, and the answers to that; what is left then is for the next turn."""
        router = self._router
        for _ in range(_MOST_ROUNDS):
            inbox, router.inbox = router.inbox, []
            self._events.messages(router.me, inbox)
            if not router.inbox:
                break

    def _flush(self) -> None:
        router = self._router
        # Links of this node first: a process may act on a message at once (push a task to a worker that it was granted)
        # and reach another process directly, before our message to that one (the job's sys.path).
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
        if router.inbox or router.dirty or router.deferred_to_head:
            return 0.0
        sleep = self._wake_at - self.now
        control, data = self._control, self._data
        if control is not None:
            sleep = min(sleep, control.patience())
            if data is not None:
                sleep = min(sleep, data.patience())
            if sleep > 0.0 and not control.arm():
                return 0.0
            if data is not None and data.busy():  # arming may have made progress for which no event follows
                sleep = min(sleep, data.patience())
        return max(0.0, sleep) if sleep < FOREVER else -1.0

    def _poll_transports(self, control: ControlTransport) -> None:
        came = False
        for node, batch in control.poll():
            counts = self._router.wire_counts
            counts.received += 1
            counts.received_bytes += len(batch)
            if node not in self._router.lost_nodes:  # dead, or given up by this node until the head decides
                self.last_heard[node] = self.now
                self._read_batch(node, batch)
                came = True
        if came:
            self._flush()  # before more is polled
        if self._data is not None:
            for what, node, tag, error in self._data.progress():
                if error is None and what == "received" and node in self.last_heard:
                    self.last_heard[node] = self.now  # its heartbeats may wait behind the object
                self._events.transfer_ended(what, tag, error)
        for node, reason in control.lost():
            self._events.node_lost(node, reason)

    def _read_deferred_to_head(self) -> None:
        """Handle frames of this node's processes to the head from before this raylet became it."""
        deferred_to_head, self._router.deferred_to_head = self._router.deferred_to_head, []
        for src, frame in deferred_to_head:
            self._events.messages(src, decode(frame[20:]))

    def _read_batch(self, node: int, batch: Received) -> None:
        """Handle frames from another node, in one message."""
        mine = self._router.mine
        view = memoryview(batch)
        pos, end = 0, len(batch)
        sharing = self._sharing
        shared = sharing.offset_of(batch) if sharing is not None and end > LONG else -1
        while pos < end:
            stop = pos + 4 + _LENGTH.unpack_from(batch, pos)[0]
            dest = bytes(batch[pos + 4 : pos + 12])
            src = bytes(batch[pos + 12 : pos + 20])
            if dest in mine:
                if dest == HEAD:
                    self._router.to_head.arrived(node)
                self._events.messages(src, decode(view[pos + 20 : stop]))
            elif (
                shared < 0 or stop - pos <= LONG or sharing is None
                or not sharing.deliver(dest, src, view[pos:stop], shared + pos)
            ):  # fmt: skip
                self._router.forward(dest, src, view[pos:stop])
            pos = stop

    # ------------------------------------------------------------ links

    def _accept(self) -> None:
        while (accepted := self._listener.accept()) is not None:
            sock, pid = accepted
            link = LocalSocket(sock, NIL_PROC, pid, self._long_frames)
            self._links[link.fd] = link
            self.watch(link.fd, functools.partial(self._link_ready, link))

    def _link_ready(self, link: LocalSocket, event: int) -> None:
        if event & select.EPOLLOUT:
            self._write(link)
        if event & ~select.EPOLLOUT and link.fd in self._links:
            self._read(link)

    def _read(self, link: LocalSocket) -> bool:
        """Read once. Returns False when nothing has arrived."""
        reader = link.reader
        rest = reader.vacancy
        frames: Iterable[memoryview]
        try:
            if rest is None:
                frames = reader.feed(data) if (data := link.sock.recv(RECEIVE)) else _CLOSED
            elif size := link.sock.recv_into(rest):
                frames = () if (whole := reader.filled(size)) is None else (whole,)
            else:
                frames = _CLOSED
        except BlockingIOError:
            return False
        except OSError:
            frames = _CLOSED
        if frames is _CLOSED:
            self._lose(link, "its connection closed")
            return False
        router = self._router
        mine, peers = router.mine, link.peers
        try:
            for frame in frames:
                dest = bytes(frame[4:12])
                if not link.kind:
                    self._read_hello(link, frame)
                    if self._links.get(link.fd) is not link:
                        return False  # refused, with all that it has sent
                elif dest in mine:
                    self._events.messages(bytes(frame[12:20]), decode(frame[20:]))
                else:
                    peers.add(dest)
                    router.forward(dest, link.proc, frame)
                    if len(frame) > LONG and dest not in router.links and link.kind != GUEST:
                        self._events.long_frame_sent(link.proc)
        except (FrameError, msgspec.MsgspecError) as error:
            self._lose(link, f"it sent what is not a message: {error}")
            return False
        return True

    def _read_hello(self, link: LocalSocket, frame: memoryview) -> None:
        (hello,) = decode(frame[20:])
        if not isinstance(hello, Hello):
            raise FrameError(f"the first message is {type(hello).__name__}, not Hello")
        link.kind = hello.kind
        if link.kind == GUEST:
            link.proc = bytes(frame[12:20])
        self._events.hello(link, hello)

    def _write(self, link: LocalSocket) -> None:
        try:
            done = link.flush()
        except OSError:
            # Its last frames are still to be read; reading will find the end.
            link.out = []
            done = True
        if link.blocked is done:
            link.blocked = not done
            with contextlib.suppress(OSError):
                self.watch_writable(link.fd, not done)

    def _lose(self, link: LocalSocket, reason: str) -> None:
        self.close_link(link)
        if link.kind:
            self._events.link_closed(link, reason)
