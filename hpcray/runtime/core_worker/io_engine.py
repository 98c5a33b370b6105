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
import heapq
import select
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from typing import Any, NoReturn

import msgspec

from hpcray.common.exceptions import RaySystemError
from hpcray.common.ids import node_of
from hpcray.common.memory import keep_freed_memory
from hpcray.core.core_worker.object_table import Waiter
from hpcray.platform.busy_poll import BusyPoll
from hpcray.platform.process_tree import PrestartedThread
from hpcray.protocol.frames import HEADER, LENGTH, LONG, ROUTE, FrameError, encode_pieces
from hpcray.protocol.messages import Message, ProbeViaRaylet, decode, encode
from hpcray.runtime.core_worker.peer_sockets import NO_NEIGHBORS, EventDescriptor, Peer, PeerLinks, PeerSocket
from hpcray.runtime.core_worker.threads import BackgroundThread, PeriodicCalls

# ------------------------------------------------------------ handler waits
# Waits of signal handlers that have interrupted a wait of their own thread, and waits that outlast the session.


IDLE, FOREGROUND, BACKGROUND = 0, 1, 2
REENTRANT_WAIT = "a destructor or signal handler that interrupted hpcray itself cannot wait"


_exit_began: list[bool] = []


def begin_exit() -> None:
    """Take note that the interpreter ends: all threads that still wait are daemons, which it leaves where they are."""
    _exit_began.append(True)


def end_wait(engine: IoEngine) -> NoReturn:
    """End a wait of this thread, as the session has ended: with an error, or with the interpreter (lock held)."""
    if _exit_began:
        while engine.holds_lock():
            engine.lock.release()
        while True:
            time.sleep(3600)
    raise RaySystemError("hpcray.shutdown() was called while this thread waited")


def wait_in_handler(engine: IoEngine, waiter: Waiter, deadline: float | None) -> bool:
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

MAX_BATCH = 64
"""Messages queued for one peer after which they are sent before the end of the turn."""
_PIECES = 512  # of a frame that are sent at once; the system takes no more than 1,024


class DescriptorCalls(dict[int, Callable[[], None]]):
    """The calls for descriptors of others for which `BusyPoll` is armed, by descriptor."""

    def use(self, fd: int, call: Callable[[], None]) -> None:
        """Make a call each time that there is something to read."""
        self[fd] = call


class Timers(list[tuple[float, int, Callable[[float], None]]]):
    """Calls to be made later: a heap of (when, number, call), the next one first."""

    _numbers = count()

    def add(self, when: float, call: Callable[[float], None]) -> None:
        """Make a call at `when` (monotonic seconds) or later; calls of the same time in the order of `add`."""
        heapq.heappush(self, (when, next(self._numbers), call))

    def run(self, now: float) -> None:
        """Make those that are due."""
        while self and self[0][0] <= now:
            heapq.heappop(self)[2](now)


class IoEngine:
    """The sockets of one process (`links`) and their driver.

    Outgoing messages are buffered per peer and encoded as one frame by `flush`. All methods want `lock` held unless
    they say otherwise.

    Args:
        me: our proc id.
        session_dir: where the sockets of our node's processes are.
        raylet: the connected socket to our raylet, past its Welcome.
        neighbors: the same as `session_dir` of other nodes of this host, by node.
        spin: see `Config.spin`.
        peer_lost: called with a process whose connection has ended, and the reason.
        drain: handles what is `released`.
        listener: what `peer_sockets.listen` made, when it had to exist before our raylet heard of us.
        thread: becomes the background thread, in place of a new one.

    Attributes:
        lock: guards everything in here, and the tables of the process.
        holds_lock: whether this thread holds the lock already: True in a destructor or signal handler that interrupted
            us.
        pending_calls: calls to be made as soon as the lock is free.
        links: the sockets. peers: `links.peers`.
        dirty: those with something to send.
        asleep: threads that wait without the lock: a KeyboardInterrupt may be raised in them.
        watched: calls for descriptors of others (`BusyPoll.arm`). loop_thread: that of an event loop that drives, or 0.
    """

    def __init__(
        self,
        me: bytes,
        session_dir: str,
        raylet: socket.socket,
        neighbors: Mapping[int, str] = NO_NEIGHBORS,
        spin: float = 0.0,
        peer_lost: Callable[[bytes, str], None] = lambda proc, reason: None,
        drain: Callable[[], None] = lambda: None,
        listener: socket.socket | None = None,
        thread: PrestartedThread | None = None,
    ) -> None:
        self.me = me
        self.lock = threading.RLock()
        self.holds_lock: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]
        self.pending_calls: list[Callable[[], object]] = []
        self.dirty: list[Peer] = []
        self._handlers: Mapping[type, Callable[[bytes, Any], None]] = {}
        keep_freed_memory()
        self.links = PeerLinks(me, {**neighbors, node_of(me): session_dir}, raylet, listener, peer_lost)
        self.peers = self.links.peers
        self.busy_poll = BusyPoll(self.links.epoll, spin)
        self.driver, self.driving, self.activity = IDLE, 0, 0
        self.closed = self._writing = False
        self.asleep: set[int] = set()
        self._drain = drain
        self.parked: list[Waiter] = []
        self.park_of: dict[int, Waiter] = {}
        self.watched, self.loop_thread = DescriptorCalls(), 0
        self._timers = Timers()
        self.sleep_until = AWAKE
        self._kick = EventDescriptor(self.links.epoll)
        self._periodic = PeriodicCalls(LONGEST_SLEEP)
        self.background = BackgroundThread(self._run_in_background, thread)

    def start(self, handlers: Mapping[type, Callable[[bytes, Any], None]]) -> None:
        """Open for business. handlers: by message type, called with (source, message) under `lock`."""
        self._handlers = handlers
        self.background.start()

    def flush_soon(self) -> None:
        """Have the background thread flush soon what was queued."""
        self.activity += 1
        if self.driver == BACKGROUND:
            self.wake()
        elif self.background.is_parked:
            self.background.unpark()

    def listen(self) -> None:
        """Have the background thread drive now, and not at its next look, unless another thread does."""
        if self.driver == IDLE and get_ident() != self.loop_thread:
            self.background.call()

    def call_soon(self, call: Callable[[], object]) -> None:
        """Make a call soon, from any thread, once the lock is free. The call must not wait for anything."""
        self.pending_calls.append(call)
        if self.sleep_until > AWAKE:
            self.wake()

    def add_timer(self, when: float, call: Callable[[float], None]) -> None:
        """Call `call(now)` under the lock at `when` (monotonic seconds) or a little later."""
        self._timers.add(when, call)
        if when < self.sleep_until and self.driver != IDLE:
            self._kick.set()
        elif self.background.is_parked and self.driver == IDLE:
            self.background.unpark()

    def call_every(self, period: float, call: Callable[[], None]) -> None:
        """Have the background thread make this call, without the lock, every `period` seconds: the shortest of all."""
        self._periodic.add(period, call)

    def wake(self) -> None:
        """Make whoever sleeps in epoll take a turn (safe anywhere, also in destructors: takes no lock)."""
        if self.driver != IDLE and not self._kick.is_set:
            self._kick.set()

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
        if self.background.is_parked:
            self.background.unpark()

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
        timers = self._timers
        until = timers[0][0] if timers else FOREVER
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
            events = (self.busy_poll if self.driver == FOREGROUND else self.links.epoll).poll(timeout)
        finally:
            self.asleep.discard(me)
            self.lock.acquire()
            self.sleep_until = AWAKE
        if len(events) > 1 and self.links.raylet.fd != events[0][0]:
            # The raylet's word (a job's sys.path, a death) comes before what peers sent because of it.
            events.sort(key=lambda event: event[0] != self.links.raylet.fd)
        for fd, event in events:
            link = self.links.by_fd.get(fd)
            if link is not None:
                if event & _WRITABLE:
                    self.links.write_rest(link)
                if event & ~_WRITABLE:
                    self._read(link)
            elif fd == self._kick.fd:
                self._kick.clear()
            elif fd == self.links.listener.fileno():
                if not self.links.accept():
                    self._pause_listening()
            elif fd in self.watched:
                self.watched[fd]()
        if timers and timers[0][0] <= (now := monotonic()):
            timers.run(now)
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

    def _run_in_background(self) -> None:
        seen = -1
        quiet = unread = 0
        lock, background, periodic = self.lock, self.background, self._periodic
        called = False
        while True:
            if monotonic() >= periodic.due:
                periodic.run()
            looks_on = self.activity != seen and unread < UNREAD_TICKS
            if looks_on and not (called or self.dirty or self.pending_calls or self.closed):
                # The foreground is at work and left nothing to be sent: its lock is not ours to fight for.
                seen = self.activity
                quiet = 0
                unread += 1
                called = background.pause(TICK)
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
                    background.park()
                    lock.release()
                    while not background.sleep(max(0.0, periodic.due - monotonic())):
                        periodic.run()
                    quiet = 0
                    continue
                if self.pending_calls:
                    self._run_pending_calls()
                lock.release()
                called = background.pause(TICK)
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
        fd, epoll = self.links.listener.fileno(), self.links.epoll
        epoll.unregister(fd)

        def again(now: float) -> None:
            if not self.closed:
                epoll.register(fd, select.EPOLLIN)

        self.add_timer(monotonic() + _ACCEPT_PAUSE, again)

    def close(self) -> None:
        """Flush, stop the background thread, close every socket. Lock not held."""
        with self.lock:
            self._drain()
            self.flush()
            self.closed = True
            self.background.unpark()
            if self.driver == IDLE:
                self._leave()  # wakes who is parked
            self._kick.set()
        patience = monotonic() + 1.0
        while self.driver != IDLE and not self.holds_lock() and monotonic() < patience:
            time.sleep(0.0005)  # whoever sleeps in epoll must be out of it before it is closed
        self.background.join(1.0)
        with self.lock:
            self._kick.close()  # `wake` does not write to it from now on
            self.links.close()

    # ------------------------------------------------------------ sending

    def send(self, proc: bytes, msg: Message) -> None:
        """Queue a message; it leaves at the next flush."""
        peer = self.peers.get(proc) or self.links.peer(proc)
        peer.out.append(msg)
        if not peer.dirty:
            peer.dirty = True
            self.dirty.append(peer)

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
                if size > LONG and link is self.links.raylet and (writers := self.links.frame_writers):
                    frame = writers[0].share(peer.proc, (frame,), size + 4) or frame
                    size = len(frame) - 4
                # What the kernel does not take at once goes to `unsent`; so does all that comes after it.
                if link.unsent:
                    link.unsent.append(frame)
                elif (sent := link.sock.send(frame)) < size + 4:
                    self.links.keep_rest(link, frame, sent)
            except BlockingIOError:
                self.links.keep_rest(link, frame, 0)
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
            writers = self.links.frame_writers if link is self.links.raylet else ()
            if writers and (shared := writers[0].share(peer.proc, pieces, size)) is not None:
                pieces, size = [shared], len(shared)
            sent = 0
            with contextlib.suppress(BlockingIOError):
                sent = 0 if link.unsent else link.sock.sendmsg(pieces[:_PIECES])
            if sent < size:
                self.links.keep_rest(link, b"".join(pieces), sent)
        except OSError:
            link.cannot_write()
        finally:
            self._writing = False

    def reroute_via_raylet(self, proc: bytes) -> None:
        """The connection to a process of another node has ended: from now on all goes through our raylet, which will
        hear how it died. If it lives, nothing is lost but what was on that connection."""
        self.send_to(self.links.via_raylet(proc), ProbeViaRaylet())

    # ------------------------------------------------------------ reading

    def read_rest(self, proc: bytes) -> None:
        """Handle all that a process reported dead has written straight to us."""
        by_fd = self.links.by_fd
        for link in [link for link in by_fd.values() if link.proc == proc]:
            while by_fd.get(link.fd) is link and self._read(link):
                pass

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
            self.links.end(link, "its connection ended")
            return False
        handlers = self._handlers
        frames: Iterable[memoryview]
        try:
            if size >= HEADER and not link.reader.buffered and LENGTH.unpack_from(inbox)[0] + 4 == size:
                frames = (inbox[:size],)  # just one, as a rule: it is decoded where it is
            else:
                frames = self.links.gather(link, size)
            for frame in frames:
                src = bytes(frame[12:20])
                if link.proc is None:
                    self.links.heard_from(link, src)
                for msg in decode(frame[20:]):
                    try:
                        handlers[type(msg)](src, msg)
                    except Exception:
                        # A defect of ours. It must not cost the messages behind this one, whose senders wait for us.
                        traceback.print_exc()
        except (FrameError, msgspec.MsgspecError) as error:
            self.links.end(link, f"it sent what is not a message: {error}")
            return False
        return True
