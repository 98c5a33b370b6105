"""The end of a node that is told to end while MPI still starts, which may take as long as the slowest rank."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ended_by_sigterm(tidy_up: Callable[[], object]) -> Iterator[None]:
    """Inside, SIGTERM ends this process after `tidy_up()`, with exit code 143; from a thread, since the main thread may
    be inside of MPI, where Python handles no signal.

    The template process would tidy up too, but it may still be importing, and Slurm kills it a moment after the rank.
    """
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(write, False)
    watched = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if watched:
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(read, watched, tidy_up), name="hpcray-early-end", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write)
        thread.join()
        os.close(read)
        if watched:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _watch(fd: int, watched: bool, tidy_up: Callable[[], object]) -> None:
    while numbers := os.read(fd, 4096):
        if watched and signal.SIGTERM in numbers:
            tidy_up()
            os._exit(128 + signal.SIGTERM)
