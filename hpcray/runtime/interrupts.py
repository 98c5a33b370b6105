"""Ctrl-C in a driver: it interrupts waiting and user code, never the middle of a table update.

A KeyboardInterrupt that lands between two bytecodes of ours could leave counts and queues half changed. So while our
code is on the main thread's stack and not asleep, the signal is sent again a moment later.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from hpcray.runtime.engine import Engine

_AGAIN = 0.001
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


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


def remove() -> None:
    """Give SIGINT back to Python."""
    if (
        threading.current_thread() is threading.main_thread()
        and getattr(signal.getsignal(signal.SIGINT), "__module__", "") == __name__
    ):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _inside(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            return True
        frame = frame.f_back
    return False
