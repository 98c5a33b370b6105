"""Code of the user that Python runs in the middle of ours: handlers of signals, and destructors that the garbage
collector calls.

Both may use hpcray. While their thread holds the engine's lock, a table may be half changed: then they could not wait
for anything. So they come a moment later, when the lock is free:

- A handler in Python that interrupts such code is not called; its signal is raised again when the lock is free. Nor,
  for a while, where other code of ours is at work that does not sleep: a handler may raise an exception. For that,
  `signal.signal` puts a `SignalHandler` in the place of each handler; `signal.getsignal` returns the user's own.
- A collection that Python begins there finds no garbage, where any of it could call code of the user: all that it looks
  at is referred to meanwhile. It is made up for as soon as the lock is free.

Nothing of this is on the way of a call. What is freed while the lock is held, without the garbage collector, has its
destructor called at once; where that waits, it gets an error (`io_engine.REENTRANT_WAIT`).
"""

from __future__ import annotations

import _thread
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import chain, compress, repeat, starmap
from operator import is_not
from time import monotonic, sleep
from types import FrameType
from typing import Any

from hpcray.platform.process_tree import forward_signals
from hpcray.platform.session_directory import read_session
from hpcray.platform.stacks import disable_stack_dump, enable_stack_dump
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.runtime.core_worker.io_engine import IoEngine
from hpcray.runtime.core_worker.object_refs import collecting

_EVENT_LOOP = "asyncio.unix_events"
"""Module of a handler that does nothing: the event loop reads from a pipe which signals came, one byte each."""
_OLDEST = 2
"""Python's last generation."""


_PATIENCE = 0.1
"""Seconds for which a handler waits for the end of code of ours that holds no lock."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
"""Seconds until a signal is raised once more whose handler has not been called: at first, and at most."""


class SignalHandler:
    """A handler of a signal that is called when it may use hpcray, and may raise an exception."""

    __slots__ = ("_raising", "_since", "_waits", "handler")

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self._since = 0.0
        self._waits = False
        self._raising = _thread.allocate_lock()

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        context = _context
        if context is not None and self._must_wait(context, frame) and self._raise_again(context.engine, number):
            return None
        self._since, self._waits = 0.0, False
        return self.handler(number, frame)

    def _must_wait(self, context: _HandlerContext, frame: FrameType | None) -> bool:
        if context.engine.holds_lock():
            return True
        if _thread.get_ident() in context.engine.asleep or not context.in_our_code(frame):
            return False
        self._since = self._since or monotonic()
        return monotonic() - self._since < _PATIENCE

    def _raise_again(self, engine: IoEngine, number: int) -> bool:
        """Have a thread raise the signal again in this one, the main thread, when the lock is free, until the handler
        is called; False: there can be no thread.

        It has the lock at that moment: if this thread waits for it, or is busy elsewhere, the handler is called there.
        Once is not enough: Python misses a signal that comes just before it begins to wait for a lock.
        """
        if self._waits:
            return True
        main = _thread.get_ident()

        def wait_and_raise() -> None:
            pause = _FIRST_PAUSE
            while self._waits:
                with engine.lock:
                    if not self._raise(main, number):
                        return
                sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

        self._waits = True
        try:
            _thread.start_new_thread(wait_and_raise, ())  # `threading` has locks of its own, which this may interrupt
        except RuntimeError:
            return False
        return True

    def _raise(self, main: int, number: int) -> bool:
        """Raise the signal in the main thread, if it still waits."""
        with self._raising:
            if self._waits:
                try:
                    signal.pthread_kill(main, number)
                except OSError:  # the main thread has ended
                    return False
            return self._waits

    def withdraw(self) -> bool:
        """This is no handler any more: raise its signal no longer, which may end the process now. Returns whether a
        signal has come for which it was not called."""
        with self._raising:
            waits, self._waits = self._waits, False
        return waits


class _SignalModule:
    """Stands for the C part of the module `signal`, in which that looks up what sets and gets handlers. So a program
    that has imported the functions of `signal` by name uses this one too."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def signal(self, number: int, handler: Any) -> Any:
        before = self._module.getsignal(number) if number in self._module.valid_signals() else None
        waits = isinstance(before, SignalHandler) and before.withdraw()
        replaced = self._module.signal(number, _guarded(handler))
        if waits and callable(handler):
            self._module.raise_signal(number)
        return _own(replaced)

    def getsignal(self, number: int) -> Any:
        return _own(self._module.getsignal(number))


class _HandlerContext:
    """The state of this process for its handlers and collections.

    Attributes:
        engine: the engine whose lock counts. in_our_code: whether a frame is one of our code.
        held: what a collection must not find. due: the generation that is to be collected when the lock is free, or -1.
    """

    def __init__(self, engine: IoEngine, in_our_code: Callable[[FrameType | None], bool]) -> None:
        self.engine, self.in_our_code = engine, in_our_code
        self.held: list[list[Any]] | None = None
        self.due = -1

    def keep_all(self, generation: int) -> None:
        """Have the collection of this generation that begins now find no garbage, and make up for it."""
        self.held = [_collected_objects(young) for young in range(generation + 1)]
        if self.due < 0:
            self.engine.pending_calls.append(self.collect)
        self.due = max(self.due, min(generation + 1, _OLDEST))  # what is left is a generation older

    def collect(self) -> None:
        """Make the collections that are due (lock not held)."""
        generation, self.due = self.due, -1
        if generation >= 0:
            gc.collect(generation)


def _collected_objects(young: int) -> list[Any]:
    """Return the objects of a generation that can be part of a cycle: all but tuples, which only refer to others.

    Another thread may just be making a tuple, and Python raises a SystemError in it if anything else refers to that
    tuple. So no reference to a tuple may exist when threads switch, which they do between two steps of Python's: this
    is one step. The objects are listed twice, once for their types, in the same order.
    """
    # The second list is read to its end: the result has these iterators, too, and one that is open would keep its list.
    return list(compress(chain(_listed(young), repeat(None)), map(is_not, map(type, _listed(young)), repeat(tuple))))


def _listed(young: int) -> Iterator[Any]:
    """The objects of a generation, listed when the first is read."""
    return chain.from_iterable(starmap(gc.get_objects, ((young,),)))


def _calls_user_code(generation: int) -> bool:
    """Return whether a collection of this generation may call code of the user.

    Mostly not, and then it goes on as it is: to hold its objects promotes what lives for a moment only, so that the
    last generation would be collected all the time, which took as long as to submit the tasks.
    """
    return any(map(_may_call, set(map(type, chain.from_iterable(map(_listed, range(generation + 1)))))))


@lru_cache(1024)
def _may_call(kind: type) -> bool:
    """Return whether the end of an object of a type may: its destructor, or the callback of a weak reference to it."""
    weak = kind.__weakrefoffset__ and kind.__flags__ & 1 << 9  # Py_TPFLAGS_HEAPTYPE: no type of Python's own
    return kind.__module__.partition(".")[0] != "hpcray" and (hasattr(kind, "__del__") or bool(weak))


_context: _HandlerContext | None = None


def defer_interruptions(engine: IoEngine, in_our_code: Callable[[FrameType | None], bool]) -> None:
    """Let handlers and destructors wait while their thread holds the lock of this engine.

    Args:
        in_our_code: whether the code that a handler has interrupted is ours, and not called by the user's.
    """
    global _context
    _context = _HandlerContext(engine, in_our_code)
    names = vars(signal)
    if not isinstance(names["_signal"], _SignalModule):
        names["_signal"] = _SignalModule(names["_signal"])
        gc.callbacks.append(_on_collection)
    if threading.current_thread() is threading.main_thread():
        module = names["_signal"]._module
        for number in signal.valid_signals():
            known = module.getsignal(number)
            if callable(known) and known is not signal.default_int_handler and _guarded(known) is not known:
                module.signal(number, _guarded(known))


def end_interruptions() -> None:
    """Take note that this process, or a child that the code of the user has forked, has left its job."""
    global _context
    _context = None


_HELD_AT_FORK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_masks: dict[int, set[Any]] = {}
"""By the identifier of a thread that forks: the signals that it had blocked before."""


def _hold_signals() -> None:
    _masks[_thread.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_AT_FORK)


def _let_signals_come() -> None:
    mask = _masks.pop(_thread.get_ident(), None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _begin_child() -> None:
    if _context is not None:  # the code of the user has forked it
        _give_signals_back()
    end_interruptions()
    _let_signals_come()


def _give_signals_back() -> None:
    """Give signals their usual effect where their handlers are of hpcray.

    `multiprocessing.Pool` ends its processes by SIGTERM, and would wait for them for ever: where SIGTERM begins a drain
    of the job, a driver's handler passes it on to the raylet and a worker's ignores it; and no handler in Python is
    called while a process waits inside of C, if the signal came just before.
    """
    signal.set_wakeup_fd(-1)  # the pipe is the parent's
    _reset_handlers(_HELD_AT_FORK, lambda module: module.partition(".")[0] == "hpcray")


def _reset_handlers(numbers: Iterable[int], is_ours: Callable[[str], bool]) -> None:
    """Give signals Python's own handling where the module of their handler is one of ours."""
    for number in numbers:
        if is_ours(getattr(signal.getsignal(number), "__module__", None) or ""):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


# A new child of Python's forgets signals for which there is a handler and that came before its first line.
os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_come, after_in_child=_begin_child)


def _guarded(handler: Any) -> Any:
    if not callable(handler) or isinstance(handler, (int, SignalHandler)):
        return handler
    return handler if getattr(handler, "__module__", "") == _EVENT_LOOP else SignalHandler(handler)


def _own(handler: Any) -> Any:
    return handler.handler if isinstance(handler, SignalHandler) else handler


def _on_collection(phase: str, info: dict[str, int]) -> None:
    context = _context
    if phase != "start":
        collecting.clear()
        if context is not None:
            context.held = None
        return
    collecting.append(True)
    if context is not None and context.engine.holds_lock() and _calls_user_code(info["generation"]):
        context.keep_all(info["generation"])


# ------------------------------------------------------------ driver signals
# Signals in a driver. Ctrl-C interrupts waiting and user code, never the middle of a table update.
#
# A KeyboardInterrupt that lands between two bytecodes of ours could leave counts and queues half changed. So while our
# code is on the main thread's stack and not asleep, the signal is sent again a moment later.
#
# What announces the end of the job is passed to the raylet, which has it drain: it would end this process by itself.
# SIGUSR2 brings a report of what the program waits for.


_RESEND_DELAY = 0.001
"""Seconds after which an interrupt is sent again that came in the middle of our code."""
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_INTERRUPTIBLE = tuple(
    _OURS + name.replace("/", os.sep)
    for name in ("jobs/", "progress_bars.py", "experimental/tqdm_ray.py", "util/helpers.py")
)
"""Code that waits for other jobs, or for iterators of the program's, may be interrupted: it has no tables."""


def defer_sigint(engine: IoEngine) -> None:
    """Take over SIGINT, if the program has left it at Python's default and this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    main = threading.get_ident()

    def handle(signum: int, frame: FrameType | None) -> None:
        if not engine.closed and main not in engine.asleep and in_our_code(frame):
            again = threading.Timer(_RESEND_DELAY, os.kill, (os.getpid(), signum))
            again.daemon = True
            again.start()
            return
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)


def forward_to_raylet(process: CoreWorker) -> None:
    """Pass the signals that begin a drain to the raylet, and report at SIGUSR2, if the program has left them at their
    default."""
    _report_on_signal(process)
    if not process.place.run.signals or threading.current_thread() is not threading.main_thread():
        return
    forward_signals(read_session(process.place.session_dir).pid, process.place.run.signals)


def _report_on_signal(process: CoreWorker) -> None:
    if threading.current_thread() is not threading.main_thread():
        return

    enable_stack_dump()

    def report(signum: int, frame: FrameType | None) -> None:
        process.diagnostics.report_waits()

    if signal.SIGUSR2 not in process.place.run.signals and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, report)


def exit_at_drain_deadline(process: CoreWorker) -> None:
    """Exit at the deadline of a drain, from the engine: the main thread may be anywhere."""

    def on_exit(code: int) -> None:
        if process.drain_client.reason and process.dead is None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(process.place.run.exit_code)

    def on_begin() -> None:
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not signal.SIG_DFL and getattr(handler, "__module__", "") != forward_signals.__module__:
            process.drain_client.takes_part = True  # a handler of the program's own wants time to do what it does

    process.exit_listeners.append(on_exit)
    process.drain_client.on_begin.append(on_begin)


def restore() -> None:
    """Give the signals back to Python."""
    if threading.current_thread() is not threading.main_thread():
        return
    disable_stack_dump()
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
    _reset_handlers(numbers, lambda module: module in (__name__, forward_signals.__module__))


def in_our_code(frame: FrameType | None) -> bool:
    """Return True if a frame of a driver is in code of ours, or called by it, that must not be interrupted."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            return not frame.f_code.co_filename.startswith(_INTERRUPTIBLE)
        frame = frame.f_back
    return False
