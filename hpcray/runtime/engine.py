"""The I/O engine of a driver or worker process: its sockets, and who drives them.

One thread at a time *drives*: it sleeps in epoll, reads, and handles messages under `lock`. A thread that waits for
something drives by itself, so a reply costs no thread switch. A background thread takes over only while nobody waits:

- after foreground activity it looks every `TICK` seconds: it flushes what was buffered, and starts to drive once the
  foreground has been quiet for a tick;
- while a foreground thread sits in epoll for long, it parks altogether: an idle process uses no CPU;
- a foreground thread that finds it driving kicks it out of epoll.

Whoever drives flushes after each turn. `lock` is never held while user code runs, with one exception: the garbage
collector (or a signal) may run a destructor (or a handler) of the user anywhere. The lock is reentrant for their sake.
What they submit is queued `later`; what they would have to wait for is an error (`wait`).
"""

from __future__ import annotations

import contextlib
import heapq
import os
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hpcray.base.errors import RaySystemError
from hpcray.core.owner.table import Waiter
from hpcray.runtime.early_thread import EarlyThread
from hpcray.runtime.links import NOBODY, Links
from hpcray.runtime.refs import released
from hpcray.runtime.spinning import SpinningPoll

TICK = 0.002
QUIET_TICKS = 25
LONGEST_SLEEP = 3600.0
GRACE = 0.01
"""For so long after its deadline a wait still takes in what streams in: `get(timeout=0)` sees what is there."""
_LISTEN_AGAIN = 0.1
_WRITABLE = select.EPOLLOUT
_NESTED = "a destructor or signal handler that interrupted hpcray itself cannot wait"
FOREVER = float("inf")
IDLE, FOREGROUND, BACKGROUND = 0, 1, 2
AWAKE = 0.0

monotonic = time.monotonic
get_ident = threading.get_ident


class Engine(Links):
    """See the module.

    Args:
        me, session_dir, neighbours: see `Links`. spin: see `Config.spin`.
    """

    def __init__(self, me: bytes, session_dir: str, neighbours: Mapping[int, str] = NOBODY, spin: float = 0.0) -> None:
        super().__init__(me, session_dir, neighbours)
        self.spinning = SpinningPoll(self._epoll, spin)
        self.driver = IDLE
        self.activity = 0
        self.closed = False
        self.asleep: set[int] = set()
        self._drain: Callable[[], None] = lambda: None
        self._parked: list[Waiter] = []
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._timer_count = 0
        self._sleep_until = AWAKE
        self._gate = threading.Lock()
        self._gate.acquire()
        self._gated = False
        self._kicked = False
        self._kick = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._kick, select.EPOLLIN)
        self._early: EarlyThread | None = None
        self._look: Callable[[], None] = lambda: None
        self._look_period = LONGEST_SLEEP
        self._look_at = monotonic() + LONGEST_SLEEP
        self._thread = threading.Thread(target=self._background, name="hpcray-io", daemon=True)

    def start(
        self,
        raylet: socket.socket,
        handlers: dict[type, Callable[[bytes, Any], None]],
        peer_lost: Callable[[bytes, str], None],
        drain: Callable[[], None],
        listener: socket.socket | None = None,
    ) -> None:
        """Open for business.

        Args:
            raylet: the connected socket to our raylet, past its Welcome.
            handlers: by message type, called with (source, message) under `lock`.
            peer_lost: called with (proc, reason) under `lock` when a direct peer's connection ends.
            drain: called under `lock` before and after each turn (deferred releases).
            listener: what `listen` made, when it had to exist before our raylet heard of us.
        """
        self._handlers, self._peer_lost, self._drain = handlers, peer_lost, drain
        self._open(raylet, listener)
        (self._thread.start if self._early is None else partial(self._early.begin, self._background))()

    def adopt(self, early: EarlyThread) -> None:
        """Use this thread instead of a new one, in `start`."""
        self._early, self._thread = early, early.thread

    def buffered(self) -> None:
        """Something was queued without a flush: make sure that the background thread looks soon."""
        self.activity += 1
        if self.driver == BACKGROUND:
            self.wake()
        elif self._gated:
            self._gated = False
            self._gate.release()

    def later(self, call: Callable[[], object]) -> None:
        """Make a call, soon, from whatever thread, once the lock is free. It must not wait for anything."""
        self.after.append(call)
        if self._sleep_until > AWAKE:
            self.wake()

    def add_timer(self, when: float, call: Callable[[float], None]) -> None:
        """Call `call(now)` under the lock at `when` (monotonic seconds) or a little later."""
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, call))
        if when < self._sleep_until and self.driver != IDLE:
            os.eventfd_write(self._kick, 1)
        elif self._gated and self.driver == IDLE:
            self._gated = False
            self._gate.release()

    def look_every(self, period: float, look: Callable[[], None]) -> None:
        """Have the background thread call `look`, without the lock, every `period` seconds while somebody waits."""
        self._look, self._look_period, self._look_at = look, period, monotonic() + period

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
        elif self._sleep_until > AWAKE:
            self.wake()  # its thread may be the one that sleeps in epoll

    def wait(self, waiter: Waiter, deadline: float | None = None) -> bool:
        """Block until `waiter.count` is zero; drive meanwhile if nobody does. Lock held on entry and on return.

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
                raise RaySystemError("hpcray.shutdown() was called while this thread waited")
            if self.driver == IDLE or waiter.turn:
                waiter.turn = False
                self.driver = FOREGROUND
                try:
                    while waiter.count > 0 and in_time and not self.closed:
                        in_time = self._turn(deadline)
                finally:
                    self._leave()
            else:
                in_time = self._park(waiter, deadline)
        if self.after:
            self._run_after()
        return waiter.count <= 0

    def _park(self, waiter: Waiter, deadline: float | None) -> bool:
        gate = waiter.lock = threading.Lock()
        gate.acquire()
        self._parked.append(waiter)
        if self.driver == BACKGROUND:
            self.wake()
        timeout = -1.0 if deadline is None else min(max(0.0, deadline - monotonic()), LONGEST_SLEEP)
        me = get_ident()
        completed = False
        self.lock.release()
        try:
            if self.nested():
                raise RaySystemError(_NESTED)
            self.asleep.add(me)  # from here to `discard` a KeyboardInterrupt is let through: the lock is not ours
            gate.acquire(timeout=timeout)
            completed = True
        finally:
            self.asleep.discard(me)
            self.lock.acquire()
            waiter.lock = None
            if waiter in self._parked:
                self._parked.remove(waiter)
            elif waiter.turn and (waiter.count <= 0 or not completed):
                waiter.turn = False
                self._leave()
        return waiter.turn or deadline is None or monotonic() < deadline

    def _leave(self) -> None:
        """Stop driving: hand over to a parked thread, or let the background thread know."""
        self.activity += 1
        while self._parked:
            heir = self._parked.pop(0)
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

    def _turn(self, deadline: float | None) -> bool:
        """One turn: sleep in epoll, handle what came, flush. Lock held on entry and return, not while asleep.

        Returns:
            False when the deadline has passed.
        """
        if self.after and self._run_after():
            return deadline is None or monotonic() < deadline
        if released:
            self._drain()
        if self.dirty:
            self.flush()
        until = self._timers[0][0] if self._timers else FOREVER
        if deadline is not None and deadline < until:
            until = deadline
        self._sleep_until = until
        timeout = -1.0 if until == FOREVER else min(max(0.0, until - monotonic()), LONGEST_SLEEP)
        me = get_ident()
        self.lock.release()
        try:
            if self.nested():
                raise RaySystemError(_NESTED)
            self.asleep.add(me)  # from here to `discard` a KeyboardInterrupt is let through: the lock is not ours
            # The background thread, awake, would take the interpreter from the user's threads.
            events = (self.spinning if self.driver == FOREGROUND else self._epoll).poll(timeout)
        finally:
            self.asleep.discard(me)
            self.lock.acquire()
            self._sleep_until = AWAKE
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
        if self._timers:
            now = monotonic()
            while self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2](now)
        if released:
            self._drain()
        if self.dirty:
            self.flush()
        if self.after:
            self._run_after()
        return deadline is None or monotonic() < (deadline + GRACE if events else deadline)

    def run_after(self) -> None:
        """Make the calls that came due (lock not held)."""
        if self.after and not self.nested():
            with self.lock:
                self._run_after()

    def _run_after(self) -> bool:
        """False: the lock is held further out too, so they must wait."""
        after, self.after = self.after, []
        calls = iter(after)
        self.lock.release()
        try:
            if self.nested():
                return False
            for call in calls:
                try:
                    call()
                except Exception:
                    traceback.print_exc()
        finally:
            self.lock.acquire()
            self.after[:0] = calls
        return True

    def _background(self) -> None:
        seen = -1
        quiet = 0
        lock = self.lock
        while True:
            if monotonic() >= self._look_at:
                self._look_now()
            if self.activity != seen and not (self.dirty or self.after or self.closed):
                # The foreground is at work and left nothing to be sent: its lock is not ours to fight for.
                seen = self.activity
                quiet = 0
                time.sleep(TICK)
                continue
            lock.acquire()
            if self.closed:
                lock.release()
                return
            if self.driver != IDLE or self.activity != seen:
                quiet = quiet + 1 if self.activity == seen else 0
                seen = self.activity
                self._drain()
                if self.dirty:
                    self.flush()
                if self.driver != IDLE and quiet > QUIET_TICKS:
                    self._gated = True
                    lock.release()
                    while not self._gate.acquire(timeout=max(0.0, self._look_at - monotonic())):
                        self._look_now()
                    quiet = 0
                    continue
                if self.after:
                    self._run_after()
                lock.release()
                time.sleep(TICK)
                continue
            self.driver = BACKGROUND
            try:
                while self.activity == seen and not self._parked and not self.closed:
                    self._turn(None)
            except Exception:
                # A defect of ours; the process must stay reachable, and the words must reach somebody.
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

        self.add_timer(monotonic() + _LISTEN_AGAIN, again)

    def _look_now(self) -> None:
        self._look_at = monotonic() + self._look_period
        try:
            self._look()
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
        while self.driver != IDLE and not self.nested() and monotonic() < patience:
            time.sleep(0.0005)  # whoever sleeps in epoll must be out of it before it is closed
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        with self.lock:
            self._kicked = True  # nobody writes to the descriptor from now on
            os.close(self._kick)
            self._close_links()
