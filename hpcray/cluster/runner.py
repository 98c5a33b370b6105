"""Running a launch line: descriptors handed on, signals forwarded, the exit code brought back."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from hpcray.host.console import VARIABLE, ConsoleOffer
from hpcray.host.exit_file import VARIABLE as EXIT_FILE
from hpcray.host.exit_file import ExitFile

# What the rank with the program (0 as a rule) is sent for a signal of ours.
_FORWARDED = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
}
_NEWS = frozenset({signal.SIGUSR1, signal.SIGUSR2})
"""These ask for nothing to end: `sbatch --signal=B:USR1@60` sends one to the batch script, which we may be."""
_ORPHAN_GRACE = 8.0
_LEAVING = 30.0
"""When rank 0 has left, the others have this long. srun would wait minutes for one that was on a lost node."""
_AT_LAST = 5.0
_LOOK = 2.0
"""Where there is no console, this often is looked whether the program's end was told in a file."""
_CHUNK = 1 << 16
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def run_launcher(line: Sequence[str], console: bool) -> int:
    """Run `line` until the job has ended.

    Args:
        line: the mpirun or srun command.
        console: whether the rank with the program ("rank 0" below, though it may be another) is expected on this host:
            it then gets our own stdin, stdout and stderr, and our signals. Otherwise the launcher passes them on in its
            own way.

    Returns:
        The program's exit code: what rank 0 told, else the launcher's; 128 + n for signal n. Told over the socket of
        the console, or in a file where there is none and ranks have died.
    """
    run = _Run(ConsoleOffer() if console else None)
    with _descriptors() if console else contextlib.nullcontext((0, 1, 2)) as descriptors:
        try:
            run.start(line)
        except OSError as error:
            print(f"hpcray-launch: cannot start {line[0]}: {error.strerror}", file=sys.stderr)
            return 127
        with _handling(run.forward):
            return run.wait(descriptors)


class _Run:
    """One launch. `offer` None: the launcher does what else the console does."""

    def __init__(self, offer: ConsoleOffer | None) -> None:
        self._offer = offer
        self._told = ExitFile(os.getcwd())
        self._asked: list[int] = []
        self._hurried = False

    def start(self, line: Sequence[str]) -> None:
        """Start the launcher, so that it ends when this process is killed.

        Raises:
            OSError: it cannot be started.
        """
        if self._offer is None:
            # In our process group: it reads the terminal itself.
            environ = {**os.environ, EXIT_FILE: self._told.path}
            self._launcher = subprocess.Popen(line, env=environ, preexec_fn=_end_with_parent)
            return
        self._launcher = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            env={**os.environ, VARIABLE: self._offer.name},
            preexec_fn=_end_with_parent,
            start_new_session=True,  # a Ctrl-C at the terminal is ours to forward
        )

    def forward(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: rank 0 gets the signal and passes it to the program. A second request to end goes to the
        launcher, which ends all ranks; a third kills it."""
        if number not in _NEWS:
            self._asked.append(number)
        if len(self._asked) > 1 and number not in _NEWS:
            self._launcher.send_signal(signal.SIGTERM if len(self._asked) == 2 else signal.SIGKILL)
        elif self._offer is not None and self._offer.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._offer.pid, _FORWARDED[signal.Signals(number)])
        elif self._offer is not None or number != signal.SIGINT or not _in_foreground():
            self._launcher.send_signal(number)

    def wait(self, descriptors: tuple[int, int, int]) -> int:
        """The exit code, when all is over."""
        offer = self._offer
        deadline = late = float("inf")
        with selectors.DefaultSelector() as selector:
            ended = os.pidfd_open(self._launcher.pid)
            selector.register(ended, selectors.EVENT_READ)
            if offer is not None:
                selector.register(offer, selectors.EVENT_READ)
            while True:
                if offer is None and min(deadline, late) == float("inf") and self._told.is_there():
                    late = time.monotonic() + _LEAVING
                look = time.monotonic() + _LOOK if offer is None else float("inf")
                soonest = min(deadline, late, look)
                events = selector.select(None if soonest == float("inf") else max(0.0, soonest - time.monotonic()))
                for key, _ in events:
                    if key.fileobj is offer and offer is not None:
                        selector.unregister(offer)
                        offer.serve(descriptors)
                        if offer.open:
                            selector.register(offer, selectors.EVENT_READ)
                        else:
                            late = time.monotonic() + _LEAVING
                    else:
                        selector.unregister(ended)
                        deadline, late = time.monotonic() + _ORPHAN_GRACE, float("inf")
                if time.monotonic() >= late:
                    late = self._hurry()
                over = deadline != float("inf")
                rank0_is_here = offer is not None and offer.open and offer.pid is not None
                if over and (not rank0_is_here or time.monotonic() >= deadline):
                    break
            os.close(ended)
        return self._code(self._launcher.wait())

    def _hurry(self) -> float:
        """End a launcher that waits for ranks long after rank 0 has left; when to do more."""
        self._launcher.send_signal(signal.SIGKILL if self._hurried else signal.SIGTERM)
        self._hurried = True
        return time.monotonic() + _AT_LAST

    def _code(self, status: int) -> int:
        if status < 0:
            _remove_leftovers(self._launcher.pid)
        code = 128 - status if status < 0 else status
        offer, told = self._offer, self._told.take()
        if offer is None and told is not None:
            return told
        if offer is not None:
            offer.close()
            # A SIGTERM that we did not send is mpirun's, because of another rank: its code tells of that one.
            ended_by_launcher = offer.code == 128 + signal.SIGTERM and not self._asked and code
            if offer.code is not None and not ended_by_launcher:
                return offer.code
        if self._asked:
            return 128 + self._asked[0]
        if code in (0, 1) and offer is not None and offer.pid is not None:
            # Rank 0 died without a word. A launcher that is to survive the death of ranks reports success all the same,
            # or the code of those that have left because of it.
            return 128 + signal.SIGKILL
        return code


@contextlib.contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


@contextlib.contextmanager
def _descriptors() -> Iterator[tuple[int, int, int]]:
    """stdin, stdout and stderr for rank 0. It runs in another session and cannot read our terminal: a thread does."""
    if not os.isatty(0):
        yield 0, 1, 2
        return
    if not _in_foreground():
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield null, 1, 2
        finally:
            os.close(null)
        return
    read, write = os.pipe()
    threading.Thread(target=_pump, args=(0, write), daemon=True).start()
    try:
        yield read, 1, 2
    finally:
        os.close(read)


def _pump(source: int, sink: int) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(source, _CHUNK):
            os.write(sink, data)
    os.close(sink)


def _in_foreground() -> bool:
    """Whether what is typed at the terminal comes to our process group."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _end_with_parent() -> None:
    """Runs in the launcher-to-be: SIGTERM when `hpcray-launch` is killed; mpirun then ends its ranks and tidies up."""
    _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM), 0, 0, 0)


def _remove_leftovers(pid: int) -> None:
    """Remove the session directory of an mpirun (Open MPI 5) that was killed."""
    shutil.rmtree(os.path.join(tempfile.gettempdir(), f"ompi.{pid}"), ignore_errors=True)
