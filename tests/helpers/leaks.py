"""What a job left behind: processes, /dev/shm files, session directories, descriptors of this process.

Every process of a test inherits LEAK_CHECK_ID in its environment, and that is how it is found again, wherever it has
moved in the process tree. Session directories go under a directory of the test's own.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hpcray.runtime.raylet.log_monitor import IN_CREATE, IN_MOVED_TO, DirectoryWatch

TEST_ID = "LEAK_CHECK_ID"
PATIENCE = 30.0
_LOOKS, _LOOK_PERIOD = 5, 0.02  # at who uses a new file: its maker may not have mapped it yet


def wait_until(condition: Callable[[], object], what: str, timeout: float = 60.0) -> None:
    """Poll until the condition holds; fail the test when it does not within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout:g} s in vain for: {what}"
        time.sleep(0.01)


def processes_with(variable: str, value: str) -> dict[int, str]:
    """Live processes that were started with `variable=value` in their environment: pid to command name."""
    needle = f"{variable}={value}".encode()
    found: dict[int, str] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
                if needle in environ and state not in "ZX":
                    found[int(name)] = Path(f"/proc/{name}/comm").read_text().strip()
    return found


class LeakCheck:
    """One test's marks and what carries them.

    Attributes:
        test_id: the value of LEAK_CHECK_ID.
        tmp: the directory that holds the test's session directories.
    """

    def __init__(self) -> None:
        self.test_id = uuid.uuid4().hex
        self.tmp = Path(tempfile.mkdtemp(prefix="hct-", dir="/tmp"))
        self._shm = _SharedMemory(self.processes)
        self._fds = _open_descriptors()

    @property
    def environ(self) -> dict[str, str]:
        """What to add to the environment of every process of the test."""
        return {TEST_ID: self.test_id, "HPCRAY_TMPDIR": str(self.tmp)}

    def processes(self, name: str = "") -> dict[int, str]:
        """Live processes of this test, all or those with this command name: pid to command name."""
        found = processes_with(TEST_ID, self.test_id)
        return {pid: comm for pid, comm in found.items() if not name or comm == name}

    def sessions(self) -> list[Path]:
        """Session directories of this test."""
        return sorted(self.tmp.glob("hpcray-*/*"))

    def left(self) -> dict[str, object]:
        """Everything that is still there."""
        found = {
            "processes": self.processes(),
            "sessions": [os.path.join(top, name) for top, dirs, files in os.walk(self.tmp) for name in dirs + files],
            "/dev/shm": self._shm.left(),
            "descriptors": _open_descriptors() - self._fds,
        }
        return {kind: things for kind, things in found.items() if things}

    def check(self, patience: float = PATIENCE) -> None:
        """Fail unless everything is gone within `patience` seconds."""
        deadline = time.monotonic() + patience
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, f"still there after {patience:g} s: {left}"

    def clean(self) -> None:
        """Kill and remove what a failed test left."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.tmp, ignore_errors=True)
        self._shm.close()


class _SharedMemory:
    """The files that a test's processes make in /dev/shm, where other jobs of this machine make files too.

    A new file is of the test if one of its processes has it mapped or open when it appears.

    Args:
        processes: gives the test's processes.
    """

    def __init__(self, processes: Callable[[], dict[int, str]]) -> None:
        self._processes = processes
        self._ours: set[str] = set()
        self._watch = DirectoryWatch("/dev/shm", IN_CREATE | IN_MOVED_TO)
        self._end, self._ended = os.pipe()
        self._thread = threading.Thread(target=self._run, name="shared-memory-watch", daemon=True)
        self._thread.start()

    def left(self) -> set[str]:
        """The test's files that are still there."""
        return {name for name in self._ours if os.path.exists(f"/dev/shm/{name}")}

    def close(self) -> None:
        """Watch no longer."""
        os.close(self._ended)
        self._thread.join()
        os.close(self._end)
        self._watch.close()

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._watch, self._end], [], [])
            if self._end in ready:
                return
            names = self._watch.read()
            for _ in range(_LOOKS):
                names = {name for name in names if os.path.exists(f"/dev/shm/{name}")}
                used = _used_by([*self._processes(), os.getpid()], names)
                self._ours |= used
                names -= used
                if not names:
                    break
                time.sleep(_LOOK_PERIOD)


@contextlib.contextmanager
def leak_checked(environ: Callable[[str, str], object]) -> Iterator[LeakCheck]:
    """Mark the environment through `environ(name, value)`; fail after a test that passed if anything is left."""
    leaks = LeakCheck()
    for name, value in leaks.environ.items():
        environ(name, value)
    try:
        yield leaks
        leaks.check()
    finally:
        leaks.clean()


def _open_descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith(("/proc/", "/dev/pts", "/dev/null")):
                found.add(f"{name} -> {target}")
    return found


def _used_by(pids: Iterable[int], names: set[str]) -> set[str]:
    """The files of /dev/shm that these processes have mapped or open."""
    found: set[str] = set()
    for pid in pids if names else ():
        with contextlib.suppress(OSError):
            used = Path(f"/proc/{pid}/maps").read_text().splitlines()
            used += [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
            paths = {line[line.find("/dev/shm/") + len("/dev/shm/") :] for line in used if "/dev/shm/" in line}
            found |= names & {path.removesuffix(" (deleted)") for path in paths}
    return found
