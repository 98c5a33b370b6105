"""The I/O engine of a driver or worker process: its sockets, and who drives them.

One thread at a time *drives*: it sleeps in epoll, reads, and handles messages under `lock`. A thread that waits for
something drives by itself, so a reply costs no thread switch. A background thread takes over while no thread waits:

- after foreground activity it looks every `TICK` seconds: it flushes what was buffered, and starts to drive once the
  foreground has been quiet for a tick;
- while the foreground uses hpcray without ever waiting, it drives all the same every `UNREAD_TICKS`;
- while a foreground thread sits in epoll for long, it parks altogether: an idle process uses no CPU;
- a foreground thread that finds it driving kicks it out of epoll;
- `listen` calls it at once, where something is awaited by no thread of its own: a callback, an asyncio loop.

Whoever drives flushes after each turn. `lock` is never held while user code runs, with one exception: the garbage
collector (or a signal) may run a destructor (or a handler) of the user anywhere. The lock is reentrant for their sake.
What they submit goes through `call_soon`; `wait` raises an error in them. A handler that interrupts a thread which
waits without the lock may wait itself.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import mmap
import os
import select
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import sleep
from typing import Any, NoReturn, Protocol

import msgspec

from hpcray.common.exceptions import RaySystemError
from hpcray.common.ids import node_of, number_of, raylet_of
from hpcray.common.memory import PROCESS_ROOM, BufferPool, keep_freed_memory
from hpcray.core.core_worker.object_table import Waiter
from hpcray.platform.busy_poll import BusyPoll
from hpcray.platform.process_tree import PrestartedThread
from hpcray.platform.sockets import SOCKET_BUFFER, connect_private, is_same_user, send_pieces
from hpcray.protocol.frames import HEADER, LENGTH, LONG, ROUTE, FrameError, encode_pieces
from hpcray.protocol.messages import Message, ProbeViaRaylet, decode, encode
from hpcray.runtime.core_worker.peer_sockets import NO_NEIGHBORS, Peer, PeerSocket, listen

# ------------------------------------------------------------ handler waits
# Waits of signal handlers that have interrupted a wait of their own thread, and waits that outlast the session.


IDLE, FOREGROUND, BACKGROUND = 0, 1, 2
REENTRANT_WAIT = "a destructor or signal handler that interrupted hpcray itself cannot wait"


_exit_began: list[bool] = []


def begin_exit() -> None:
    """Take note that the interpreter ends: all threads that still wait are daemons, which it leaves where they are."""
    _exit_began.append(True)


def end_wait(engine: Engine) -> NoReturn:
    """End a wait of this thread, as the session has ended: with an error, or with the interpreter (lock held)."""
    if _exit_began:
        while engine.holds_lock():
            engine.lock.release()
        while True:
            sleep(3600)
    raise RaySystemError("hpcray.shutdown() was called while this thread waited")


class Engine(Protocol):
    """`IoEngine` as it is seen from here; described there."""

    lock: Any
    holds_lock: Callable[[], bool]
    asleep: set[int]
    closed: bool
    driver: int
    driving: int
    parked: list[Waiter]
    park_of: dict[int, Waiter]
    sleep_until: float

    def wait(self, waiter: Waiter, deadline: float | None = None) -> bool: ...

    def turn(self, deadline: float | None) -> bool: ...

    def listen(self) -> None: ...

    def wake(self) -> None: ...


def wait_in_handler(engine: Engine, waiter: Waiter, deadline: float | None) -> bool:
    """`IoEngine.wait` for a handler. The wait that it interrupted cannot go on before the handler returns: if that one
    drives, the handler drives in its place, and if it is parked, no thread hands over to it meanwhile.

    Returns:
        False when the deadline has passed.

    Raises:
        RaySystemError: it was no wait: the handler interrupts a table update.
    """
    me = get_ident()
    engine.lock.release()
    try:
        if engine.holds_lock():
            raise RaySystemError(REENTRANT_WAIT)
    finally:
        engine.lock.acquire()
    drives, was_asleep, sleep_until = engine.driving == me, me in engine.asleep, engine.sleep_until
    parked = engine.park_of.pop(me, None)
    if parked is not None and parked in engine.parked:
        engine.parked.remove(parked)
    try:
        if drives or (parked is not None and parked.turn):
            while waiter.count > 0 and not engine.closed and engine.turn(deadline):
                pass
        else:
            engine.wait(waiter, deadline)
        return deadline is None or monotonic() < deadline
    finally:
        if was_asleep:
            engine.asleep.add(me)
        if parked is not None:
            engine.park_of[me] = parked
        if drives:
            engine.driving, engine.sleep_until = me, sleep_until
            engine.wake()  # what the interrupted wait sleeps for may have come meanwhile
        elif parked is not None and parked.count > 0 and not parked.turn:
            engine.parked.append(parked)
            if engine.driver == IDLE:
                engine.listen()  # the background thread hands over to it
            elif engine.driver == BACKGROUND:
                engine.wake()


# ------------------------------------------------------------ io engine


TICK = 0.002
"""Seconds between two looks of the background thread while the foreground is active."""
QUIET_TICKS = 25
"""Ticks without activity after which the background thread parks while a foreground thread sleeps."""
UNREAD_TICKS = 100
"""Ticks with activity after which the background thread drives all the same: a foreground that never waits reads no
messages, not even that its task is cancelled."""
LONGEST_SLEEP = 3600.0
"""Seconds; a longer wait is split."""
DEADLINE_GRACE = 0.01
"""For so long after its deadline a wait still takes in what streams in: `get(timeout=0)` sees what is there."""
_ACCEPT_PAUSE = 0.1
"""Seconds without accepting connections when the process is out of descriptors."""
_WRITABLE = select.EPOLLOUT
FOREVER = float("inf")
AWAKE = 0.0

monotonic = time.monotonic
get_ident = threading.get_ident


# Destructors may run anywhere, also while the engine's lock is held by the same thread, so all they do is append here;
# the engine drains it. Refs: the object id. Views: (id,).
released: deque[Any] = deque()

RECV = 1 << 18
"""Bytes that one read takes at most."""
MAX_BATCH = 64
"""Messages queued for one peer after which they are sent before the end of the turn."""
_PIECES = 512  # of a frame that are sent at once; the system takes no more than 1,024
_SPARES = 8
"""Descriptors that are kept for peers that connect when the user's code has taken all others."""


class FrameWriter(Protocol):
    """The method of `FrameSlotClient` that the engine calls."""

    def share(self, dest: bytes, pieces: Sequence[bytes], size: int) -> bytes | None:
        """Write a frame into a slot. Returns the frame that is sent instead; None: there is no slot."""


class DescriptorCalls(dict[int, Callable[[], None]]):
    """The calls for descriptors of others for which `BusyPoll` is armed, by descriptor."""

    def use(self, fd: int, call: Callable[[], None]) -> None:
        """Make a call each time that there is something to read."""
        self[fd] = call


class IoEngine:
    """The sockets of one process (one per peer of its host, one to its raylet for everything else) and their driver.

    Outgoing messages are buffered per peer and encoded as one frame by `flush`. All methods want `lock` held unless
    they say otherwise.

    Args:
        me: our proc id.
        session_dir: where the sockets of our node's processes are.
        neighbors: the same of other nodes of this host, by node.
        spin: see `Config.spin`.

    Attributes:
        lock: guards everything in here, and the tables of the process.
        holds_lock: whether this thread holds the lock already: True in a destructor or signal handler that interrupted
            us.
        pending_calls: calls to be made as soon as the lock is free.
        peers: the processes that we have written to or heard of, by proc id; see `peer`.
        dirty: those with something to send.
        asleep: threads that wait without the lock: a KeyboardInterrupt may be raised in them.
        watched: calls for descriptors of others (`BusyPoll.arm`). loop_thread: that of an event loop that drives, or 0.
    """

    def __init__(
        self,
        me: bytes,
        session_dir: str,
        neighbors: Mapping[int, str] = NO_NEIGHBORS,
        spin: float = 0.0,
        peer_lost: Callable[[bytes, str], None] = lambda proc, reason: None,
        drain: Callable[[], None] = lambda: None,
    ) -> None:
        self.me = me
        self.lock = threading.RLock()
        self.holds_lock: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]
        self.pending_calls: list[Callable[[], object]] = []
        self.dirty: list[Peer] = []
        self._my_node = node_of(me)
        self._dirs = {**neighbors, self._my_node: session_dir}
        self._lost: set[int] = set()
        self._handlers: dict[type, Callable[[bytes, Any], None]] = {}
        self._peer_lost = peer_lost
        self._epoll = select.epoll()
        self._links: dict[int, PeerSocket] = {}
        # `recv` would allocate RECV bytes each time: three system calls and two page faults, as malloc sees them. These
        # get memory as far as they are ever filled: a new worker does not touch all of them.
        self._inbox = memoryview(mmap.mmap(-1, RECV, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        keep_freed_memory()
        self._long_frames = BufferPool(PROCESS_ROOM)
        self._writing = False
        self.peers: dict[bytes, Peer] = {}
        self._listener: socket.socket
        self._spare_fds: list[int] = []
        self._raylet: PeerSocket
        self.busy_poll = BusyPoll(self._epoll, spin)
        self.driver = IDLE
        self.activity = 0
        self.closed = False
        self.asleep: set[int] = set()
        self.frame_writers: list[FrameWriter] = []
        self._drain = drain
        self.parked: list[Waiter] = []
        self.park_of: dict[int, Waiter] = {}
        self.driving = 0
        self.watched, self.loop_thread = DescriptorCalls(), 0
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._timer_count = 0
        self.sleep_until = AWAKE
        self._gate = threading.Lock()
        self._gate.acquire()
        self._gated = False
        self._called = threading.Lock()
        self._called.acquire()
        self._kicked = False
        self._kick = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._kick, select.EPOLLIN)
        self._prestarted: PrestartedThread | None = None
        self._periodic: list[Callable[[], None]] = []
        self._period = LONGEST_SLEEP
        self._period_end = monotonic() + LONGEST_SLEEP
        self._thread = threading.Thread(target=self._background, name="hpcray-io", daemon=True)

    def start(
        self,
        raylet: socket.socket,
        handlers: dict[type, Callable[[bytes, Any], None]],
        listener: socket.socket | None = None,
    ) -> None:
        """Open for business.

        Args:
            raylet: the connected socket to our raylet, past its Welcome.
            handlers: by message type, called with (source, message) under `lock`.
            listener: what `listen` made, when it had to exist before our raylet heard of us.
        """
        self._handlers = handlers
        self._open(raylet, listener)
        (self._thread.start if self._prestarted is None else partial(self._prestarted.begin, self._background))()

    def use_prestarted_thread(self, thread: PrestartedThread) -> None:
        """Use this thread instead of a new one, in `start`."""
        self._prestarted, self._thread = thread, thread.thread

    def flush_soon(self) -> None:
        """Have the background thread flush soon what was queued."""
        self.activity += 1
        if self.driver == BACKGROUND:
            self.wake()
        elif self._gated:
            self._gated = False
            self._gate.release()

    def listen(self) -> None:
        """Have the background thread drive now, and not at its next look, unless another thread does."""
        if self.driver == IDLE and self._called.locked() and get_ident() != self.loop_thread:
            with contextlib.suppress(RuntimeError):
                self._called.release()

    def call_soon(self, call: Callable[[], object]) -> None:
        """Make a call soon, from any thread, once the lock is free. The call must not wait for anything."""
        self.pending_calls.append(call)
        if self.sleep_until > AWAKE:
            self.wake()

    def add_timer(self, when: float, call: Callable[[float], None]) -> None:
        """Call `call(now)` under the lock at `when` (monotonic seconds) or a little later."""
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, call))
        if when < self.sleep_until and self.driver != IDLE:
            os.eventfd_write(self._kick, 1)
        elif self._gated and self.driver == IDLE:
            self._gated = False
            self._gate.release()

    def call_every(self, period: float, call: Callable[[], None]) -> None:
        """Have the background thread make this call, without the lock, every `period` seconds: the shortest of all."""
        self._periodic.append(call)
        self._period = min(self._period, period)
        self._period_end = monotonic() + self._period

    def wake(self) -> None:
        """Make whoever sleeps in epoll take a turn (safe anywhere, also in destructors: takes no lock)."""
        if self.driver != IDLE and not self._kicked:
            self._kicked = True
            os.eventfd_write(self._kick, 1)

    # ------------------------------------------------------------ waiting

    def notify(self, waiter: Waiter) -> None:
        """`waiter` is satisfied (lock held)."""
        if waiter.callback is not None:
            waiter.callback()
        elif waiter.lock is not None:
            with contextlib.suppress(RuntimeError):
                waiter.lock.release()
        elif self.sleep_until > AWAKE:
            self.wake()  # its thread may be the one that sleeps in epoll

    def wait(self, waiter: Waiter, deadline: float | None = None) -> bool:
        """Block until `waiter.count` is zero; drive meanwhile unless another thread does. Lock held before and after.

        Returns:
            False when the deadline (monotonic seconds) passed first.

        Raises:
            RaySystemError: the session ended meanwhile, or the caller interrupts a table update (see the module).
        """
        if self.dirty:
            self.flush()
        in_time = True
        while waiter.count > 0 and in_time:
            if self.closed:
                end_wait(self)
            if self.driver == IDLE or waiter.turn:
                waiter.turn = False
                self.driver = FOREGROUND
                try:
                    while waiter.count > 0 and in_time and not self.closed:
                        in_time = self.turn(deadline)
                finally:
                    self._leave()
            else:
                in_time = self._park(waiter, deadline)
        if self.pending_calls:
            self._run_pending_calls()
        return waiter.count <= 0

    def _park(self, waiter: Waiter, deadline: float | None) -> bool:
        me = get_ident()
        if self.driving == me or me in self.park_of:
            return wait_in_handler(self, waiter, deadline)
        self.park_of[me] = waiter
        gate = waiter.lock = threading.Lock()
        gate.acquire()
        self.parked.append(waiter)
        if self.driver == BACKGROUND:
            self.wake()
        timeout = -1.0 if deadline is None else min(max(0.0, deadline - monotonic()), LONGEST_SLEEP)
        completed = False
        self.lock.release()
        try:
            if self.holds_lock():
                raise RaySystemError(REENTRANT_WAIT)
            self.asleep.add(me)  # from here to `discard` a KeyboardInterrupt is let through: the lock is not ours
            gate.acquire(timeout=timeout)
            completed = True
        finally:
            self.asleep.discard(me)
            self.lock.acquire()
            self.park_of.pop(me, None)
            waiter.lock = None
            if waiter in self.parked:
                self.parked.remove(waiter)
            elif waiter.turn and (waiter.count <= 0 or not completed):
                waiter.turn = False
                self._leave()
        return waiter.turn or deadline is None or monotonic() < deadline

    def _leave(self) -> None:
        """Stop driving: hand over to a parked thread, or let the background thread know."""
        self.activity += 1
        self.driving = 0
        while self.parked:
            heir = self.parked.pop(0)
            if self.closed and heir.lock is not None:
                with contextlib.suppress(RuntimeError):
                    heir.lock.release()
            elif heir.count > 0 and heir.lock is not None:
                heir.turn = True
                self.driver = FOREGROUND
                heir.lock.release()
                return
        self.driver = IDLE
        if self._gated:
            self._gated = False
            self._gate.release()

    # ------------------------------------------------------------ driving

    def turn(self, deadline: float | None) -> bool:
        """One turn: sleep in epoll, handle what came, flush. Lock held on entry and return, not while asleep.

        Returns:
            False when the deadline has passed.
        """
        self.driving = me = get_ident()
        if self.pending_calls and self._run_pending_calls():
            return deadline is None or monotonic() < deadline
        if released:
            self._drain()
        if self.dirty:
            self.flush()
        until = self._timers[0][0] if self._timers else FOREVER
        if deadline is not None and deadline < until:
            until = deadline
        self.sleep_until = until
        timeout = -1.0 if until == FOREVER else min(max(0.0, until - monotonic()), LONGEST_SLEEP)
        self.lock.release()
        try:
            if self.holds_lock():
                raise RaySystemError(REENTRANT_WAIT)
            self.asleep.add(me)  # from here to `discard` a KeyboardInterrupt is let through: the lock is not ours
            # The background thread, awake, would take the interpreter from the user's threads.
            events = (self.busy_poll if self.driver == FOREGROUND else self._epoll).poll(timeout)
        finally:
            self.asleep.discard(me)
            self.lock.acquire()
            self.sleep_until = AWAKE
        if len(events) > 1 and self._raylet.fd != events[0][0]:
            # The raylet's word (a job's sys.path, a death) comes before what peers sent because of it.
            events.sort(key=lambda event: event[0] != self._raylet.fd)
        for fd, event in events:
            link = self._links.get(fd)
            if link is not None:
                if event & _WRITABLE:
                    self._write_rest(link)
                if event & ~_WRITABLE:
                    self._read(link)
            elif fd == self._kick:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._kick)
                self._kicked = False
            elif fd == self._listener.fileno():
                self._accept()
            elif fd in self.watched:
                self.watched[fd]()
        if self._timers:
            now = monotonic()
            while self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2](now)
        if released:
            self._drain()
        if self.dirty:
            self.flush()
        if self.pending_calls:
            self._run_pending_calls()
        return deadline is None or monotonic() < (deadline + DEADLINE_GRACE if events else deadline)

    def run_pending_calls(self) -> None:
        """Make the calls that came due (lock not held)."""
        if self.pending_calls and not self.holds_lock():
            with self.lock:
                self._run_pending_calls()

    def _run_pending_calls(self) -> bool:
        """False: the lock is held further out too, so they must wait."""
        after, self.pending_calls = self.pending_calls, []
        calls = iter(after)
        self.lock.release()
        try:
            if self.holds_lock():
                return False
            for call in calls:
                try:
                    call()
                except Exception:
                    traceback.print_exc()
        finally:
            self.lock.acquire()
            self.pending_calls[:0] = calls
        return True

    def _background(self) -> None:
        seen = -1
        quiet = unread = 0
        lock = self.lock
        called = False
        while True:
            if monotonic() >= self._period_end:
                self._call_periodic()
            looks_on = self.activity != seen and unread < UNREAD_TICKS
            if looks_on and not (called or self.dirty or self.pending_calls or self.closed):
                # The foreground is at work and left nothing to be sent: its lock is not ours to fight for.
                seen = self.activity
                quiet = 0
                unread += 1
                called = self._called.acquire(timeout=TICK)
                continue
            lock.acquire()
            if self.closed:
                lock.release()
                return
            if called or unread >= UNREAD_TICKS:
                seen, called = self.activity, False
            unread = 0
            if self.driver != IDLE or self.activity != seen:
                quiet = quiet + 1 if self.activity == seen else 0
                seen = self.activity
                self._drain()
                if self.dirty:
                    self.flush()
                if self.driver != IDLE and quiet > QUIET_TICKS:
                    self._gated = True
                    lock.release()
                    while not self._gate.acquire(timeout=max(0.0, self._period_end - monotonic())):
                        self._call_periodic()
                    quiet = 0
                    continue
                if self.pending_calls:
                    self._run_pending_calls()
                lock.release()
                called = self._called.acquire(timeout=TICK)
                continue
            self.driver = BACKGROUND
            try:
                while self.activity == seen and not self.parked and not self.closed:
                    self.turn(None)
            except Exception:
                # A defect of ours; the process must stay reachable, and the traceback must be printed.
                traceback.print_exc()
            finally:
                self._leave()
                lock.release()

    def _pause_listening(self) -> None:
        fd = self._listener.fileno()
        self._epoll.unregister(fd)

        def again(now: float) -> None:
            if not self.closed:
                self._epoll.register(fd, select.EPOLLIN)

        self.add_timer(monotonic() + _ACCEPT_PAUSE, again)

    def _call_periodic(self) -> None:
        self._period_end = monotonic() + self._period
        for call in self._periodic:
            try:
                call()
            except Exception:
                traceback.print_exc()

    def close(self) -> None:
        """Flush, stop the background thread, close every socket. Lock not held."""
        with self.lock:
            self._drain()
            self.flush()
            self.closed = True
            if self._gated:
                self._gated = False
                self._gate.release()
            if self.driver == IDLE:
                self._leave()  # wakes who is parked
            os.eventfd_write(self._kick, 1)
        patience = monotonic() + 1.0
        while self.driver != IDLE and not self.holds_lock() and monotonic() < patience:
            time.sleep(0.0005)  # whoever sleeps in epoll must be out of it before it is closed
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        with self.lock:
            self._kicked = True  # `wake` does not write to the descriptor from now on
            os.close(self._kick)
            self._close_links()

    def _open(self, raylet: socket.socket, listener: socket.socket | None) -> None:
        self._raylet = self._add_link(raylet, raylet_of(self._my_node))
        self._listener = listener or listen(self._dirs[self._my_node], number_of(self.me))
        with contextlib.suppress(OSError):
            self._spare_fds += [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(_SPARES)]
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)

    # ------------------------------------------------------------ sending

    def peer(self, proc: bytes) -> Peer:
        """The peer record of a process, connecting when it is of our host."""
        found = self.peers.get(proc)
        if found is None:
            found = self.peers[proc] = Peer(proc, self._connect(proc), self.me)
            if found.link is self._raylet and number_of(proc) and node_of(proc) in self._dirs:
                # If it is for want of descriptors, it must not try to connect to us either.
                found.out.append(ProbeViaRaylet())
        return found

    def on_probe_via_raylet(self, proc: bytes) -> None:
        """Write through our raylet to a process of this host that can write to us through raylets only."""
        if proc not in self.peers:
            self.peers[proc] = Peer(proc, self._raylet, self.me)

    def send(self, proc: bytes, msg: Message) -> None:
        """Queue a message; it leaves at the next flush."""
        peer = self.peers.get(proc) or self.peer(proc)
        peer.out.append(msg)
        if not peer.dirty:
            peer.dirty = True
            self.dirty.append(peer)

    def add_neighbor_raylet(self, sock: socket.socket, raylet: bytes) -> Peer:
        """Add a connection to another node's raylet, for `send_to` alone: `send` goes through our raylet."""
        return Peer(raylet, self._add_link(sock, raylet), self.me)

    def drop_neighbor_raylet(self, peer: Peer) -> None:
        """Close the connection that `add_neighbor_raylet` returned."""
        peer.out.clear()
        self._drop_link(peer.link)

    def send_to(self, peer: Peer, msg: Message) -> None:
        """Queue a message for a peer record. `send` does the same inline, to save the call."""
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
                if size > LONG and link is self._raylet and self.frame_writers:
                    frame = self.frame_writers[0].share(peer.proc, (frame,), size + 4) or frame
                    size = len(frame) - 4
                # What the kernel does not take at once goes to `unsent`; so does all that comes after it.
                if link.unsent:
                    link.unsent.append(frame)
                elif (sent := link.sock.send(frame)) < size + 4:
                    self._keep_rest(link, frame, sent)
            except BlockingIOError:
                self._keep_rest(link, frame, 0)
            except OSError:
                link.cannot_write()
            finally:
                self._writing = False

    def flush_long_soon(self, peer: Peer, now: bool) -> None:
        """Write out what is queued for one peer, which is long, at the end of the turn, or now.

        `flush` would do, but for two more copies of the bytes, and while the message grows even more.
        """
        if now:
            self._flush_long(peer)
        elif peer in self.dirty:
            self.dirty.remove(peer)
            self.pending_calls.append(partial(self._end_long, peer))

    def _end_long(self, peer: Peer) -> None:
        with self.lock:
            if self._writing:  # `flush` goes on with it
                self.dirty.append(peer)
            else:
                peer.dirty = False
                self._flush_long(peer)

    def _flush_long(self, peer: Peer) -> None:
        if self._writing or not peer.out:
            return
        self._writing = True
        link = peer.link
        try:
            fresh: list[Message] = []
            out, peer.out = peer.out, fresh
            pieces = encode_pieces(out)
            size = sum(map(len, pieces)) + HEADER
            pieces.insert(0, LENGTH.pack(size - 4) + peer.route)
            writers = self.frame_writers if link is self._raylet else ()
            if writers and (shared := writers[0].share(peer.proc, pieces, size)) is not None:
                pieces, size = [shared], len(shared)
            sent = 0
            with contextlib.suppress(BlockingIOError):
                sent = 0 if link.unsent else link.sock.sendmsg(pieces[:_PIECES])
            if sent < size:
                self._keep_rest(link, b"".join(pieces), sent)
        except OSError:
            link.cannot_write()
        finally:
            self._writing = False

    def _keep_rest(self, link: PeerSocket, frame: bytes, sent: int) -> None:
        link.unsent.append(memoryview(frame)[sent:])
        self._epoll.modify(link.fd, select.EPOLLIN | select.EPOLLOUT)

    def reroute_via_raylet(self, proc: bytes) -> None:
        """The connection to a process of another node has ended: from now on all goes through our raylet, which will
        hear how it died. If it lives, nothing is lost but what was on that connection."""
        self.peers[proc] = Peer(proc, self._raylet, self.me)
        self.send(proc, ProbeViaRaylet())

    def peers_of(self, node: int) -> list[bytes]:
        """The processes of a node that we have written to or heard of."""
        return [proc for proc in self.peers if node_of(proc) == node]

    # ------------------------------------------------------------ reading and writing

    def read_rest(self, proc: bytes) -> None:
        """Handle all that a process reported dead has written straight to us."""
        for link in [link for link in self._links.values() if link.proc == proc]:
            while self._links.get(link.fd) is link and self._read(link):
                pass

    def write_rest(self, patience: float) -> None:
        """Write out what the kernel would not take yet, for at most `patience` seconds: this process ends."""
        until = monotonic() + patience
        for link in list(self._links.values()):
            poll = select.poll()
            poll.register(link.fd, select.POLLOUT)
            while link.unsent and link.fd in self._links and (left := until - monotonic()) > 0:
                poll.poll(1000 * left)
                self._write_rest(link)

    def _read(self, link: PeerSocket) -> bool:
        """Handle what a link holds; False when there was nothing, or it has ended."""
        inbox = link.inbox
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
            if size >= HEADER and not link.reader.buffered and LENGTH.unpack_from(inbox)[0] + 4 == size:
                frames = (inbox[:size],)  # just one, as a rule: it is decoded where it is
            else:
                frames = self._gather(link, size)
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

    def _gather(self, link: PeerSocket, size: int) -> Iterable[memoryview]:
        """The frames that are complete, with `size` bytes more in the inbox of the link."""
        reader = link.reader
        if reader.vacancy is None:
            frames = list(reader.feed(bytes(link.inbox[:size])))
        else:
            whole = reader.filled(size)
            frames = [] if whole is None else [whole]
        link.inbox = self._inbox if reader.vacancy is None else reader.vacancy
        return frames

    def _write_rest(self, link: PeerSocket) -> None:
        try:
            if not send_pieces(link.sock, link.unsent, SOCKET_BUFFER):
                return
        except OSError:
            link.cannot_write()
            return
        self._epoll.modify(link.fd, select.EPOLLIN)

    # ------------------------------------------------------------ links

    def _add_link(self, sock: socket.socket, proc: bytes | None) -> PeerSocket:
        link = PeerSocket(sock, proc, self._inbox, self._long_frames)
        self._links[link.fd] = link
        self._epoll.register(link.fd, select.EPOLLIN)
        return link

    def _connect(self, proc: bytes) -> PeerSocket:
        directory = self._dirs.get(node_of(proc))
        if directory is None or number_of(proc) == 0:
            return self._raylet
        # Without a connection of our own (it is dead, or we are out of descriptors) our raylet passes frames on, or
        # reports how it died.
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
                    if self._spare_fds:
                        os.close(self._spare_fds.pop())  # the user's code has all descriptors but these
                        continue
                    self._pause_listening()
                return
            if not is_same_user(sock):
                sock.close()
                continue
            self._add_link(sock, None)

    def _unlink(self, link: PeerSocket, reason: str) -> None:
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
        for link in list(self._links.values()):
            if link.proc is not None and node_of(link.proc) == node and link is not self._raylet:
                self._drop_link(link)

    def _drop_link(self, link: PeerSocket) -> bool:
        """Close it; False when it was closed before: its descriptor may be that of another by now."""
        if self._links.get(link.fd) is not link:
            return False
        del self._links[link.fd]
        with contextlib.suppress(OSError):
            self._epoll.unregister(link.fd)
        link.sock.close()
        return True

    def close_after_fork(self) -> None:
        """Close the copies of a child that user code forked: else our peers would not see us end before it does."""
        for link in self._links.values():
            link.sock.close()
        self._listener.close()

    def _close_links(self) -> None:
        for link in self._links.values():
            link.sock.close()
        self._links.clear()
        self._listener.close()
        for fd in self._spare_fds:
            os.close(fd)
        self._spare_fds.clear()
        with contextlib.suppress(OSError):
            os.unlink(f"{self._dirs[self._my_node]}/{number_of(self.me)}.s")
        self._epoll.close()
