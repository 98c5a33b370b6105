"""What a submitted job runs: submitit calls a `Launch` on the job's first node, and that starts the nodes of hpcray.

It stays beside the launch to its end, for three reasons: the result must be written, the driver must hear that the time
is up, and a job that is to start again must be given back to the queue.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcray.cluster import slurm_jobs
from hpcray.cluster.outcome import (
    CALL,
    CANCELLED,
    CHECKPOINT,
    DRIVER,
    EXIT,
    LOST,
    OUTCOME,
    Call,
    Outcome,
    read_pickle,
    write_pickle,
)
from hpcray.host.processes import Family, die_with_parent

TIME_IS_UP = signal.SIGUSR2
_DRAIN = signal.SIGUSR1
_WORK_LEFT = 75
"""Exit code of a job that was drained: EX_TEMPFAIL of sysexits.h."""
_GRACE = 10.0


@dataclass(frozen=True)
class Launch:
    """One job as submitit sees it: a callable that returns an `Outcome`, and that it can start again.

    Attributes:
        nodes: number of hpcray nodes.
        cpus_per_node: CPUs that each offers; None: it finds out.
        gpus_per_node: GPUs that each offers; None: those it was given.
        script: what follows the interpreter; empty for a function.
        call: the function; None for a script.
        slurm: whether the nodes come from a Slurm allocation.
        requeues: how often the job may start again.
        time: seconds that it may run, where nobody else tells it; None: no limit, or Slurm tells.
        env: variables of the job.
    """

    nodes: int
    cpus_per_node: int | None
    gpus_per_node: int | None
    script: tuple[str, ...]
    call: Call | None
    slurm: bool
    requeues: int
    time: int | None
    env: Mapping[str, str]

    def __call__(self) -> Outcome:
        """Run the job.

        Raises:
            SystemExit: the job goes back to the queue and will be started again.
        """
        outcome = _Run(self, Path(os.environ["SUBMITIT_FOLDER"])).to_the_end()
        if self.slurm and not outcome.ok:
            # For submitit all is well when the result is written; Slurm, and what depends on the job, must know better.
            atexit.register(os._exit, outcome.code or 1)
        return outcome

    def checkpoint(self) -> Any:
        """What submitit shall run next time; None where the job may not start again."""
        from submitit.helpers import DelayedSubmission

        if not self.requeues:
            return None
        with contextlib.suppress(FileNotFoundError):
            return DelayedSubmission(replace(self, call=read_pickle(Path(os.environ["SUBMITIT_FOLDER"]) / CHECKPOINT)))
        return DelayedSubmission(self)

    def line(self, folder: Path) -> list[str]:
        """The hpcray-launch line."""
        line = [sys.executable, "-m", "hpcray.cluster.launch", "-n", str(self.nodes)]
        if self.slurm:
            line.append("--srun")
        if self.cpus_per_node is not None:
            line += ["--cpus-per-node", str(self.cpus_per_node)]
        if self.gpus_per_node is not None:
            line += ["--gpus-per-node", str(self.gpus_per_node)]
        return line + (list(self.script) if self.call is None else ["-m", "hpcray.cluster.call", str(folder)])

    def environ(self) -> dict[str, str]:
        """The environment of the launch."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SUBMITIT_LOCAL_")}
        if "SLURM_CPUS_PER_TASK" in environ:
            # Since Slurm 22.05 a step gets one CPU per task unless it asks for what the job has.
            environ.setdefault("SRUN_CPUS_PER_TASK", environ["SLURM_CPUS_PER_TASK"])
        if self.time is not None:
            environ["HPCRAY_END_TIME"] = str(time.time() + self.time)
        # To ask for another start is our business: it must be counted, and submitit has to know what to call then.
        return {**environ, **self.env, "HPCRAY_REQUEUE": "exit"}


@contextlib.contextmanager
def unterminated() -> Iterator[None]:
    """SIGTERM does nothing to this process, nor to those that it starts. Slurm sends it to all processes of a job that
    is requeued, also to the scontrol that asked for it and has not heard yet that it was obeyed."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Run:
    def __init__(self, launch: Launch, folder: Path) -> None:
        self._launch = launch
        self._folder = folder
        self._ended_by = ""
        self._child: subprocess.Popen[bytes]

    def to_the_end(self) -> Outcome:
        launch, folder = self._launch, self._folder
        for name in (OUTCOME, CHECKPOINT, DRIVER):
            (folder / name).unlink(missing_ok=True)
        if launch.call is not None:
            write_pickle(folder / CALL, launch.call)
        if not launch.slurm:
            die_with_parent(os.getppid(), signal.SIGTERM)  # the controller; this process outlives it by moments
        with _listening([TIME_IS_UP, signal.SIGTERM, signal.SIGINT]) as (wakeup, previous):
            self._start()
            try:
                if (folder / CANCELLED).exists():
                    self._heard(signal.SIGTERM)
                code = self._wait(wakeup)
            finally:
                self._end()
        if code == _WORK_LEFT and not self._ended_by:
            self._ended_by = "time"  # hpcray itself has seen the end come
        outcome = self._outcome(code)
        if outcome.ok or not launch.requeues or not self._ended_from_outside():
            return outcome
        handler = previous[TIME_IS_UP]
        assert callable(handler), "submitit has a handler for the end of the time"
        with unterminated():
            handler(TIME_IS_UP, None)
        raise AssertionError("submitit did not leave")

    def _ended_from_outside(self) -> bool:
        """Whether it did not end by itself. Preemption signals the step only, and looks like scancel there."""
        if self._ended_by == "time":
            return True
        cancelled = (self._folder / CANCELLED).exists()
        return self._launch.slurm and not cancelled and slurm_jobs.preempted(os.environ.get("SLURM_JOB_ID", ""))

    def _start(self) -> None:
        me = os.getpid()
        self._child = subprocess.Popen(
            self._launch.line(self._folder),
            stdin=subprocess.DEVNULL,
            env=self._launch.environ(),
            preexec_fn=lambda: die_with_parent(me, signal.SIGTERM),
        )

    def _wait(self, wakeup: int) -> int:
        """Wait for the launch to end and answer signals meanwhile; its exit code."""
        ended = os.pidfd_open(self._child.pid)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(ended, selectors.EVENT_READ)
                selector.register(wakeup, selectors.EVENT_READ)
                while True:
                    ready = {key.fd for key, _ in selector.select()}
                    if wakeup in ready:
                        for number in os.read(wakeup, 256):
                            self._heard(number)
                    if ended in ready:
                        break
        finally:
            os.close(ended)
        status = self._child.wait()
        return 128 - status if status < 0 else status

    def _heard(self, number: int) -> None:
        if number == TIME_IS_UP:
            self._ended_by = self._ended_by or "time"
            if not self._ask_driver_for_checkpoint():
                self._child.send_signal(_DRAIN)  # to rank 0
        elif number in (signal.SIGTERM, signal.SIGINT):
            if not self._ended_by or (self._folder / CANCELLED).exists():
                self._ended_by = "SIGTERM"
            if not self._launch.slurm:  # Slurm signals every process of a job that it ends
                self._child.send_signal(signal.SIGTERM)

    def _ask_driver_for_checkpoint(self) -> bool:
        """Whether there is a driver on this host that can write a checkpoint; it was asked to."""
        try:
            driver = json.loads((self._folder / DRIVER).read_text())
        except (OSError, ValueError):
            return False
        if driver["host"] != socket.gethostname() or Family.of(driver["pid"]) is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(driver["pid"], TIME_IS_UP)
            return True
        return False

    def _end(self) -> None:
        """Whatever happened, the launch does not outlive this."""
        deadline = time.monotonic() + _GRACE
        while self._child.poll() is None:
            if time.monotonic() > deadline:
                self._child.kill()
            else:
                self._child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_GRACE / 2)

    def _outcome(self, code: int) -> Outcome:
        folder = self._folder
        (folder / CALL).unlink(missing_ok=True)
        (folder / DRIVER).unlink(missing_ok=True)
        if self._launch.call is None:
            return Outcome(EXIT, code, ended_by=self._ended_by)
        try:
            told: Outcome = read_pickle(folder / OUTCOME)
        except FileNotFoundError:
            return Outcome(LOST, code, ended_by=self._ended_by)
        (folder / OUTCOME).unlink()
        return replace(told, code=told.code or code, ended_by=self._ended_by)


@contextlib.contextmanager
def _listening(numbers: Sequence[signal.Signals]) -> Iterator[tuple[int, Mapping[signal.Signals, Any]]]:
    """A descriptor from which the numbers of arriving signals are read, and the handlers that there were."""
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    previous = {number: signal.signal(number, lambda number, frame: None) for number in numbers}
    try:
        yield read, previous
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(read)
        os.close(write)
