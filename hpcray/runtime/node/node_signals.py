"""The signals of a raylet process: while it starts, and while its node runs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

USER_SIGNALS = frozenset({signal.SIGUSR1, signal.SIGUSR2})
_MAY_BE_IGNORED = USER_SIGNALS | {signal.SIGHUP}


@contextmanager
def leaving_at_sigterm() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit(143), so that what was made is removed. For a start that Python code does."""
    watched = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def leave(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        raise SystemExit(128 + signal.SIGTERM)

    if watched:
        signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if watched and signal.getsignal(signal.SIGTERM) is leave:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


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


def outlive_user_signals() -> None:
    """Ignore the signals that launchers and batch systems send to all ranks: they would end this process."""
    for number in USER_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _ignore)


@contextmanager
def signals() -> Iterator[int]:
    """Yield a descriptor on which the signals of a raylet arrive as bytes."""
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    handled = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, *USER_SIGNALS}
    # Under nohup a job goes on without its terminal; UCX uses SIGHUP for its own purposes.
    ignored = {number for number in handled & _MAY_BE_IGNORED if signal.getsignal(number) is signal.SIG_IGN}
    handlers = {number: signal.SIG_IGN if number in ignored else _ignore for number in handled}
    old = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield read
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


def _ignore(number: int, frame: object) -> None:
    """Handle nothing; the driver would inherit SIG_IGN."""
