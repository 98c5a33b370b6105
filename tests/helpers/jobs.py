"""Running whole jobs as a user would: a script, started in one of the ways that hpcray can be started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe")


@dataclass
class Ended:
    """How a job ended."""

    code: int
    out: str
    err: str


class Job:
    """A running command with its output in pipes. A context manager: what still runs at the end is killed."""

    def __init__(self, command: Sequence[str], environ: dict[str, str] | None = None, cwd: Path | None = None) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(environ or {})},
            start_new_session=True,
            cwd=cwd,
        )

    @property
    def pid(self) -> int:
        """Pid of the command."""
        return self.child.pid

    def line(self) -> str:
        """The next line of its standard output."""
        assert self.child.stdout is not None
        return self.child.stdout.readline().rstrip("\n")

    def send(self, number: signal.Signals) -> None:
        """Send the command a signal."""
        self.child.send_signal(number)

    def wait(self, timeout: float = 60.0) -> Ended:
        """Its end; fails when it has not come within `timeout` seconds."""
        out, err = self.child.communicate(timeout=timeout)
        return Ended(self.child.returncode, out, err)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        for stream in (self.child.stdout, self.child.stderr):
            if stream is not None:
                stream.close()


def embedded(script: Path, *args: str) -> list[str]:
    """`python script.py`: one node, no launcher."""
    return [sys.executable, str(script), *args]


def under_mpirun(ranks: int, script: Path, *args: str) -> list[str]:
    """`mpirun -n N python script.py`: every rank calls init()."""
    return [*MPIRUN, "-n", str(ranks), sys.executable, str(script), *args]


def as_module(ranks: int, script: Path, *args: str) -> list[str]:
    """`mpirun -n N python -m hpcray script.py`."""
    return [*MPIRUN, "-n", str(ranks), sys.executable, "-m", "hpcray", str(script), *args]


def on_two_nodes(script: Path, *args: str) -> list[str]:
    """By `hpcray-launch`: two nodes with two CPUs each, on this host."""
    return [sys.executable, "-m", "hpcray.cli.launch", "-n", "2", "--cpus-per-node", "2", str(script), *args]


def run_with_torch(command: Sequence[str], **environ: str) -> Ended:
    """Run a program whose workers have PyTorch from the start and find the helpers of tests; it has to end with 0."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    with Job(command, {"PYTHONPATH": path, "HPCRAY_PRELOAD": "torch", **environ}) as job:
        ended = job.wait(120.0)
    assert ended.code == 0, (ended.out[-4000:], ended.err[-4000:])
    return ended
