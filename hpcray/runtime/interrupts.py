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
from typing import TYPE_CHECKING

from hpcray.host.emergency import hide, stay_visible
from hpcray.host.session import read_session
from hpcray.runtime.driver_child import pass_to
from hpcray.runtime.engine import Engine

if TYPE_CHECKING:
    from hpcray.runtime.process import Process

_AGAIN = 0.001
_ANNOUNCING = ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGUSR1, signal.SIG_DFL), (signal.SIGUSR2, signal.SIG_DFL))
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_JOBS = _OURS + "cluster" + os.sep
"""What waits for other jobs there may be interrupted: it has no tables."""


def install(engine: Engine) -> None:
    """Take over SIGINT, if the program has left it at Python's default and this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    main = threading.get_ident()

    def handle(signum: int, frame: FrameType | None) -> None:
        if not engine.closed and main not in engine.asleep and _inside(frame):
            again = threading.Timer(_AGAIN, os.kill, (os.getpid(), signum))
            again.daemon = True
            again.start()
            return
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)


def pass_on(process: Process) -> None:
    """Pass the signals that begin a drain to the raylet, and report at SIGUSR2, if the program has left them at their
    default."""
    _report_on_signal(process)
    if not process.run.signals or threading.current_thread() is not threading.main_thread():
        return
    pass_to(read_session(process.session_dir).pid, process.run.signals)


def _report_on_signal(process: Process) -> None:
    if threading.current_thread() is not threading.main_thread():
        return

    stay_visible()

    def report(signum: int, frame: FrameType | None) -> None:
        process.survey.waits.report_soon()

    if signal.SIGUSR2 not in process.run.signals and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, report)


def obey(process: Process) -> None:
    """When the time of a drain is up this program ends: its main thread may be anywhere and cannot be asked to."""

    def told(code: int) -> None:
        if process.ending.reason and process.dead is None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(process.run.exit_code)

    def begun() -> None:
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not signal.SIG_DFL and getattr(handler, "__module__", "") != pass_to.__module__:
            process.ending.interested = True  # a handler of the program's own wants time to do what it does

    process.on_exit = told
    process.ending.on_begin.append(begun)


def remove() -> None:
    """Give the signals back to Python."""
    if threading.current_thread() is not threading.main_thread():
        return
    hide()
    for number, default in ((signal.SIGINT, signal.default_int_handler), *_ANNOUNCING):
        if getattr(signal.getsignal(number), "__module__", "") in (__name__, pass_to.__module__):
            signal.signal(number, default)


def _inside(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            return not frame.f_code.co_filename.startswith(_JOBS)
        frame = frame.f_back
    return False
