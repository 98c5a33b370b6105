"""Execution of a launch line: descriptors passed on, signals forwarded, the exit code returned."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from hpcray.launch.local_ranks import EXIT_MPI_FAILED, end_orphans, fork, local_arguments, remove_sessions
from hpcray.platform.console import CONSOLE_VARIABLE, ConsoleOffer, ExitFile
from hpcray.platform.console import EXIT_FILE_VARIABLE as EXIT_FILE
from hpcray.platform.mpi_directory import MpiDirectory, mpirun_settings, remove_abandoned
from hpcray.platform.process_control import become_subreaper, die_with_parent

# The signal that the rank with the program (0 as a rule) gets for a signal to this process.
_FORWARDED = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
}
_USER_SIGNALS = frozenset({signal.SIGUSR1, signal.SIGUSR2})
"""Not requests to end: `sbatch --signal=B:USR1@60` sends one to the batch script, which may be this process."""
_RANK0_EXIT_TIMEOUT = 8.0  # seconds for rank 0 to report its exit code after the launcher's end
# Seconds for the other ranks after rank 0 has left. srun would wait minutes for a rank on a lost node.
_OTHER_RANKS_EXIT_TIMEOUT = 30.0
_SIGKILL_DELAY = 5.0  # seconds between SIGTERM and SIGKILL to a launcher that does not end
_EXIT_FILE_INTERVAL = 2.0  # seconds between looks for the file with the exit code, where there is no console
_CHUNK = 1 << 16
_OPEN_MPI_LAUNCHERS = ("mpirun", "mpiexec", "prterun", "orterun")


def run_launcher(line: Sequence[str], console: bool) -> int:
    """Run `line` until the job has ended.

    Args:
        line: the mpirun or srun command.
        console: whether the rank with the program ("rank 0" below, though it may be another) is expected on this host:
            it then gets this process's stdin, stdout and stderr, and its signals. Otherwise the launcher passes them on
            in its own way.

    Returns:
        The program's exit code as rank 0 reported it, else the launcher's; 128 + n for signal n. Rank 0 reports it over
        the socket of the console, or in a file where there is no console and ranks have died.
    """
    with _descriptors() if console else contextlib.nullcontext((0, 1, 2)) as descriptors:
        for is_last in (False, True):
            run = _LauncherRun(ConsoleOffer() if console else None)
            try:
                run.start(line)
            except OSError as error:
                print(f"hpcray-launch: cannot start {line[0]}: {error.strerror}", file=sys.stderr)
                return 127
            with _handling(run.forward):
                code = run.wait(descriptors)
            if is_last or not run.may_try_again:
                break
            text = "MPI has not started, as it says above; nothing has run yet, and it is tried once more"
            print(f"hpcray-launch: {text}", file=sys.stderr, flush=True)
        return code


class _ForkedLauncher:
    """`hpcray.launch.local_ranks` in a child process that is a copy of this one; as a `subprocess.Popen`."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], end_with_parent: Callable[[], None]) -> None:
        def prepare() -> None:
            end_with_parent()
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

        self.pid = fork(argv, environ, prepare)
        self._status: int | None = None

    def wait(self) -> int:
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def send_signal(self, number: int) -> None:
        if self._status is None:
            os.kill(self.pid, number)


_HOST_OPTIONS = frozenset({"--host", "-host", "-H", "--hostfile", "-hostfile", "--machinefile", "-machinefile"})
_OF_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE", "FLUX_JOB_ID")
"""Variables of batch systems whose hosts mpirun takes."""


class _LauncherRun:
    """One run of the launcher. `offer` None: the launcher forwards output and signals in its own way.

    Attributes:
        may_try_again: whether it has ended before the program could begin, because of MPI.
    """

    def __init__(self, offer: ConsoleOffer | None) -> None:
        self._offer = offer
        self._exit_file = ExitFile(os.getcwd())
        self._launcher: subprocess.Popen[bytes] | _ForkedLauncher
        self._files: MpiDirectory | None = None
        self._end_requests: list[int] = []
        self._terminated = False
        self.may_try_again = False

    def start(self, line: Sequence[str]) -> None:
        """Start the launcher, so that it ends when this process is killed.

        Raises:
            OSError: it cannot be started.
        """
        me = os.getpid()

        def end_with_parent() -> None:  # mpirun then ends its ranks and tidies up
            die_with_parent(me, signal.SIGTERM)

        if self._offer is None:
            # In the same process group: the launcher reads the terminal itself.
            environ = {**os.environ, EXIT_FILE: self._exit_file.path, **self._settings(line)}
            self._launcher = subprocess.Popen(line, env=environ, preexec_fn=end_with_parent)
            return
        environ = {**os.environ, CONSOLE_VARIABLE: self._offer.name}
        local = local_arguments(line)
        if local is not None:
            become_subreaper()  # should it be killed, its ranks are this process's to wait for
            self._launcher = _ForkedLauncher(local, environ, end_with_parent)
            return
        self._launcher = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            env={**environ, **self._settings(line)},
            preexec_fn=end_with_parent,
            start_new_session=True,  # this process forwards a Ctrl-C at the terminal
        )

    def _settings(self, line: Sequence[str]) -> dict[str, str]:
        """The variables that have an mpirun make its files in a private directory. Where it starts daemons on other
        hosts there are none: these have no such directory."""
        elsewhere = any(word in _HOST_OPTIONS for word in line) or any(name in os.environ for name in _OF_ALLOCATIONS)
        if elsewhere or os.path.basename(line[0]) not in _OPEN_MPI_LAUNCHERS or not mpirun_settings("", os.environ):
            return {}
        try:
            self._files = MpiDirectory.create()
        except OSError as error:
            print(f"hpcray-launch: no private directory for mpirun's files can be made: {error}", file=sys.stderr)
            return {}
        return mpirun_settings(self._files.path, os.environ)

    def forward(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: rank 0 gets the signal and passes it to the program. A second request to end goes to the
        launcher, which ends all ranks; a third kills it."""
        if number not in _USER_SIGNALS:
            self._end_requests.append(number)
        if len(self._end_requests) > 1 and number not in _USER_SIGNALS:
            self._launcher.send_signal(signal.SIGTERM if len(self._end_requests) == 2 else signal.SIGKILL)
        elif self._offer is not None and self._offer.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._offer.pid, _FORWARDED[signal.Signals(number)])
        elif self._offer is not None or number != signal.SIGINT or not _in_foreground():
            self._launcher.send_signal(number)

    def wait(self, descriptors: tuple[int, int, int]) -> int:
        """Wait for the end of the job, and return its exit code."""
        offer = self._offer
        deadline = late = float("inf")
        with selectors.DefaultSelector() as selector:
            ended = os.pidfd_open(self._launcher.pid)
            selector.register(ended, selectors.EVENT_READ)
            if offer is not None:
                selector.register(offer, selectors.EVENT_READ)
            while True:
                if offer is None and deadline == float("inf") and not self._terminated:
                    late = self._late(late)
                look = time.monotonic() + _EXIT_FILE_INTERVAL if offer is None else float("inf")
                soonest = min(deadline, late, look)
                events = selector.select(None if soonest == float("inf") else max(0.0, soonest - time.monotonic()))
                for key, _ in events:
                    if key.fileobj is offer and offer is not None:
                        selector.unregister(offer)
                        offer.serve(descriptors)
                        if offer.open:
                            selector.register(offer, selectors.EVENT_READ)
                        else:
                            late = time.monotonic() + _OTHER_RANKS_EXIT_TIMEOUT
                    else:
                        selector.unregister(ended)
                        deadline, late = time.monotonic() + _RANK0_EXIT_TIMEOUT, float("inf")
                if time.monotonic() >= late:
                    late = self._end_launcher()
                over = deadline != float("inf")
                rank0_is_here = offer is not None and offer.open and offer.pid is not None
                if over and (not rank0_is_here or time.monotonic() >= deadline):
                    break
            os.close(ended)
        return self._code(self._launcher.wait())

    def _late(self, late: float) -> float:
        """The time at which ranks that outlive the program are ended, by what the file says now."""
        report = self._exit_file.report()
        if report is None or report.code is None:
            return float("inf")
        return min(late, time.monotonic() + report.patience + _OTHER_RANKS_EXIT_TIMEOUT)

    def _end_launcher(self) -> float:
        """Send SIGTERM, then SIGKILL, to a launcher that outstays rank 0; return the time of the next signal."""
        self._launcher.send_signal(signal.SIGKILL if self._terminated else signal.SIGTERM)
        self._terminated = True
        return time.monotonic() + _SIGKILL_DELAY

    def _code(self, status: int) -> int:
        local = isinstance(self._launcher, _ForkedLauncher)
        self.may_try_again = local and status == EXIT_MPI_FAILED and not self._end_requests
        if status < 0 and local:
            end_orphans()
            remove_abandoned()
            remove_sessions()
        if self._files is not None:
            self._files.remove()
        code = 128 - status if status < 0 else status
        offer, reported = self._offer, self._exit_file.take()
        if offer is None and reported is not None:
            return reported
        if offer is not None:
            offer.close()
            # A SIGTERM from elsewhere is mpirun's, because of another rank: mpirun's code is that rank's.
            ended_by_launcher = offer.code == 128 + signal.SIGTERM and not self._end_requests and code
            if offer.code is not None and not ended_by_launcher:
                return offer.code
        if self._end_requests:
            return 128 + self._end_requests[0]
        if code in (0, 1) and offer is not None and offer.pid is not None:
            # Rank 0 died without a report. A launcher that survives the death of ranks reports success all the same, or
            # the code of the ranks that left because of it.
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
    """stdin, stdout and stderr for rank 0. It runs in another session and cannot read this terminal; a thread does."""
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
    """True if input typed at the terminal goes to this process group."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
