"""What a job left behind: processes, /dev/shm files, session directories, descriptors of this process.

Every process of a test inherits LEAK_CHECK_ID in its environment, and that is how it is found again, wherever it has
moved in the process tree. Session directories go under a directory of the test's own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

TEST_ID = "LEAK_CHECK_ID"
PATIENCE = 30.0


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
        self._shm = set(os.listdir("/dev/shm"))
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
            "/dev/shm": self._shared_memory(),
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

    def _shared_memory(self) -> set[str]:
        """New files in /dev/shm that no living process of somebody else maps: other jobs run on this machine too."""
        new = set(os.listdir("/dev/shm")) - self._shm
        return {name for name in new if not _mapped_by_others(name, self.processes())}


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


def _mapped_by_others(name: str, ours: dict[int, str]) -> bool:
    needle = f"/dev/shm/{name}"
    for pid in os.listdir("/proc"):
        if pid.isdigit() and int(pid) not in ours:
            with contextlib.suppress(OSError):
                if needle in Path(f"/proc/{pid}/maps").read_text():
                    return True
    return False
