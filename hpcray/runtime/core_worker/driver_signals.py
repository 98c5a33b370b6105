"""Signals in a driver. Ctrl-C interrupts waiting and user code, never the middle of a table update.

A KeyboardInterrupt that lands between two bytecodes of ours could leave counts and queues half changed. So while our
code is on the main thread's stack and not asleep, the signal is sent again a moment later.

What announces the end of the job is passed to the raylet, which has it drain: it would end this process by itself.
SIGUSR2 brings a report of what the program waits for.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

from hpcray.platform.process_tree import forward_signals
from hpcray.platform.session_directory import read_session
from hpcray.platform.stacks import disable_stack_dump, enable_stack_dump
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.runtime.core_worker.io_engine import IoEngine

_RESEND_DELAY = 0.001
"""Seconds after which an interrupt is sent again that came in the middle of our code."""
_ANNOUNCING = ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGUSR1, signal.SIG_DFL), (signal.SIGUSR2, signal.SIG_DFL))
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_INTERRUPTIBLE = tuple(
    _OURS + name.replace("/", os.sep)
    for name in ("jobs/", "progress_bars/progress.py", "experimental/tqdm_ray.py", "util/helpers.py")
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
    if not process.run.signals or threading.current_thread() is not threading.main_thread():
        return
    forward_signals(read_session(process.session_dir).pid, process.run.signals)


def _report_on_signal(process: CoreWorker) -> None:
    if threading.current_thread() is not threading.main_thread():
        return

    enable_stack_dump()

    def report(signum: int, frame: FrameType | None) -> None:
        process.diagnostics.report_waits()

    if signal.SIGUSR2 not in process.run.signals and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, report)


def exit_at_drain_deadline(process: CoreWorker) -> None:
    """Exit at the deadline of a drain, from the engine: the main thread may be anywhere."""

    def on_exit(code: int) -> None:
        if process.drain_client.reason and process.dead is None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(process.run.exit_code)

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
    for number, default in ((signal.SIGINT, signal.default_int_handler), *_ANNOUNCING):
        if getattr(signal.getsignal(number), "__module__", "") in (__name__, forward_signals.__module__):
            signal.signal(number, default)


def in_our_code(frame: FrameType | None) -> bool:
    """Return True if a frame of a driver is in code of ours, or called by it, that must not be interrupted."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            return not frame.f_code.co_filename.startswith(_INTERRUPTIBLE)
        frame = frame.f_back
    return False
