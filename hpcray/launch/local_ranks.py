"""Starts the MPI ranks of one host, without an mpirun.

    python -E -S hpcray/launch/local_ranks.py COUNT LIBRARY end|recover command arg…

For Open MPI, whose PMIx library LIBRARY is, it does what mpirun would, but opens no port that another user of the host
could use (`hpcray.launch.pmix_server`). Its exit code is that of the first rank that failed, 128 + n for signal n. When
a rank fails, "end" has all others ended; with "recover" they go on, once rank 0 has said that all are up (`mark_up`):
before, they would wait for it. MPI_Abort ends them in any case. SIGTERM, SIGINT and SIGHUP end the job; SIGUSR1 and
SIGUSR2 go to all ranks. Ranks end with this process, whatever ends it; what they leave ends before this process does.

It is a program of its own that loads little, since every job waits for it: the paths of packages are not searched.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from hpcray.launch.pmix_server import PmixError, PmixServer
from hpcray.platform.mpi_directory import MpiDirectory
from hpcray.platform.process_control import (
    LAUNCHER_NAME,
    TEMPLATE_NAME,
    become_subreaper,
    children,
    die_with_parent,
    set_process_name,
)

EXIT_NOT_STARTED = 127
EXIT_MPI_FAILED = 75
"""MPI has failed in a rank before all were up: nothing of the program has run, and another try may succeed."""
_ERRORS_OF_MPI = range(14, 18)
"""Exit codes of a process in which Open MPI does not start: MPI_ERR_UNKNOWN to MPI_ERR_INTERN."""
_END_TIMEOUT = 3.0
"""Seconds that ranks have to end after SIGTERM."""
_LEFT_EARLY = 1.0
"""Seconds that the others have to leave too when one has left before all were up."""
_ORPHANS_TIMEOUT, _ORPHANS_INTERVAL = 12.0, 0.01
_END_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_YIELD = "OMPI_MCA_mpi_yield_when_idle"


def compose_local(python: str, ranks: int, library: str, recover: bool, command: Sequence[str]) -> list[str]:
    """The line that starts `command` as so many ranks on this host.

    Args:
        library: path of the PMIx library of this Open MPI.
        recover: whether the other ranks go on when one has failed.
    """
    return [python, "-E", "-S", os.path.abspath(__file__), str(ranks), library, _MODES[recover], *command]


_MODES = ("end", "recover")


def fork(argv: Sequence[str], environ: Mapping[str, str], prepare: Callable[[], None]) -> int:
    """Start what such a line would in a child process, which has loaded all of it already; return its pid.

    Args:
        argv: the line behind the program's path.
        environ: the child's environment.
        prepare: called in the child first.
    """
    pid = os.fork()
    if pid:
        return pid
    code = EXIT_NOT_STARTED
    try:
        prepare()
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(environ)
        code = main(argv)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def local_arguments(line: Sequence[str]) -> Sequence[str] | None:
    """The arguments in a line of `compose_local`; None if it is another line."""
    return line[4:] if line[1:4] == ["-E", "-S", os.path.abspath(__file__)] else None


class _Ranks:
    """The processes.

    Args:
        recover: whether the others go on when one has failed, once all are up.
        up: returns whether they are.

    Attributes:
        code: the exit code. mpi_failed: whether there is a rank in which MPI has not started.
    """

    def __init__(self, recover: bool, up: Callable[[], bool]) -> None:
        self._recover, self._up = recover, up
        self._processes: list[subprocess.Popen[bytes]] = []
        self._kill_at = self._up_by = float("inf")
        self.code = 0
        self.mpi_failed = False

    def start(self, command: Sequence[str], environ: dict[str, str]) -> None:
        """Start one more rank.

        Raises:
            OSError: the command cannot be started.
        """
        me = os.getpid()

        def prepare() -> None:
            os.setpgid(0, 0)
            die_with_parent(me, signal.SIGTERM)

        self._processes.append(subprocess.Popen(command, env=environ, preexec_fn=prepare))

    def send(self, number: int) -> None:
        """Send a signal to all."""
        for process in self._processes:
            process.send_signal(number)

    def end(self, code: int) -> None:
        """End all; `code` is the exit code unless one has failed before."""
        self.code = self.code or code
        if self._kill_at == float("inf"):
            self._kill_at = time.monotonic() + _END_TIMEOUT
            self.send(signal.SIGCONT)
            self.send(signal.SIGTERM)

    def wait(self, wakeup: int, on_wakeup: Callable[[], None]) -> None:
        """Wait for the end of all. Calls `on_wakeup` whenever something was written to the pipe `wakeup`."""
        with selectors.DefaultSelector() as selector:
            selector.register(wakeup, selectors.EVENT_READ)
            for process in self._processes:
                selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, process)
            running = len(self._processes)
            while running:
                next_at = min(self._kill_at, self._up_by)
                timeout = None if next_at == float("inf") else max(0.0, next_at - time.monotonic())
                for key, _ in selector.select(timeout):
                    if key.data is None:
                        os.read(wakeup, 512)
                        on_wakeup()
                        continue
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    running -= 1
                    self._ended(key.data)
                if time.monotonic() >= self._up_by:
                    self._up_by = float("inf")
                    if not self._up():
                        self.end(0)
                if time.monotonic() >= self._kill_at:
                    self.send(signal.SIGKILL)
                    self._kill_at = time.monotonic() + _END_TIMEOUT

    def _ended(self, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        code = 128 - status if status < 0 else status
        starting = self._recover and not self._up()
        if starting and not code:  # it has left with a reason, which another process reports
            self._up_by = min(self._up_by, time.monotonic() + _LEFT_EARLY)
        elif code and (starting or not self._recover):
            if status < 0 and self._kill_at == float("inf"):
                rank = self._processes.index(process)
                when = " before all ranks were up" if starting else ""
                text = f"rank {rank} was ended by signal {-status}{when}, and so the job ends"
                print(f"hpcray-launch: {text}", file=sys.stderr, flush=True)
            self.mpi_failed |= starting and status in _ERRORS_OF_MPI
            self.end(code)
        self.code = self.code or code


def main(argv: Sequence[str]) -> int:
    """Run the ranks of a command line, and return the exit code."""
    count, library, mode, *command = argv
    size = int(count)
    set_process_name(LAUNCHER_NAME)
    wakeup, tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    events: list[Callable[[], None]] = []
    directory: MpiDirectory | None = None
    ranks = _Ranks(mode == _MODES[True], lambda: directory is not None and directory.is_marked_up)

    def later(event: Callable[[], None]) -> None:
        events.append(event)
        with contextlib.suppress(BlockingIOError):
            os.write(tell, b"\0")

    def drain() -> None:
        while events:
            events.pop(0)()

    for number in _END_REQUESTS:
        signal.signal(number, lambda number, _: later(lambda: ranks.end(128 + number)))
    for number in _USER_SIGNALS:
        signal.signal(number, lambda number, _: later(lambda: ranks.send(number)))
    become_subreaper()
    environ = dict(os.environ)  # the server changes this process's own
    if mode == _MODES[True] or size > len(os.sched_getaffinity(0)):
        # As mpirun does where ranks share cores. Those of raylets always do: their workers and templates start too.
        environ.setdefault(_YIELD, "1")
    try:
        directory = MpiDirectory.create()
        server = PmixServer(library, size, directory.path, lambda _, code: later(lambda: ranks.end(code & 0xFF or 1)))
        for rank in range(size):
            ranks.start(command, {**environ, **server.environ(rank, environ)})
        ranks.wait(wakeup, drain)
        return EXIT_MPI_FAILED if ranks.mpi_failed else ranks.code
    except (OSError, PmixError) as error:
        ranks.send(signal.SIGKILL)
        print(
            f"hpcray-launch: cannot start {size} ranks on this host: {error}; hint: --launcher openmpi starts them "
            "with mpirun, which opens ports for other users of the host (docs/security.md)",
            file=sys.stderr,
        )
        return EXIT_NOT_STARTED
    finally:
        end_orphans()
        if ranks.code:
            remove_sessions()
        if directory is not None:
            directory.remove()


def end_orphans() -> None:
    """End what ranks have left. A template process that tidies up after its raylet has its time for that."""
    deadline = time.monotonic() + _ORPHANS_TIMEOUT
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid, name in children():
                if name != TEMPLATE_NAME or time.monotonic() >= deadline:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(_ORPHANS_INTERVAL)


def remove_sessions() -> None:
    """Remove session directories of raylets that were killed before anything else could."""
    with contextlib.suppress(ImportError):  # in a program of its own, which has no packages
        from hpcray.platform.session_directory import remove_dead_sessions

        remove_dead_sessions(os.environ)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the library are running
