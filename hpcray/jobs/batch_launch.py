"""The processes of a submitted job on its first node: the batch process, and the driver of a submitted function.

submitit calls a `BatchLaunch` in the batch process, which starts all nodes. The process stays until the launch has
ended, for three reasons: it writes the result, it signals the driver when the time is up, and it gives a job that is to
start again back to the queue. Rank 0 runs the driver: `python -m hpcray.jobs.batch_launch FOLDER`.

submitit does not know PBS and Flux. There `python -m hpcray.jobs.batch_launch FOLDER batch` is the batch process: it
calls the `BatchLaunch` that the submission has left in the job's folder, and leaves its outcome there.
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
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import cloudpickle

from hpcray.common.task_errors import make_task_error
from hpcray.jobs import (
    CALL,
    CANCELLED,
    CHECKPOINT,
    DRIVER,
    ERROR,
    EXIT,
    LAUNCH,
    LOST,
    OUTCOME,
    STEM,
    VALUE,
    JobOutcome,
    PickledCall,
    batch_queues,
    read_pickle,
    write_pickle,
)
from hpcray.platform.private_files import append_private_file, read_private_file, write_private_file
from hpcray.platform.process_control import die_with_parent, module_line
from hpcray.platform.process_tree import ProcessIdentity
from hpcray.platform.sockets import node_ip_address
from hpcray.runtime.node.options import NodeOptions

BATCH = "batch"
"""Second argument of the batch process in PBS and Flux."""
TIME_IS_UP = signal.SIGUSR2
_DRAIN = signal.SIGUSR1
_EXIT_DRAINED = 75  # EX_TEMPFAIL of sysexits.h: drained, or checkpointed; try again later
_LAUNCH_EXIT_TIMEOUT = 10.0  # seconds between SIGTERM and SIGKILL to the launch


@dataclass(frozen=True)
class BatchLaunch:
    """One job as submitit sees it: a callable that returns a `JobOutcome`, and that it can start again.

    Attributes:
        nodes: number of hpcray nodes.
        node: the options of each; its `driver` is the script, and empty for a function.
        call: the function; None for a script.
        slurm: whether the nodes come from a Slurm allocation.
        requeues: how often the job may start again.
        time: limit in seconds where this process must enforce it; None: no limit, or Slurm enforces it.
        env: variables of the job.
    """

    nodes: int
    node: NodeOptions
    call: PickledCall | None
    slurm: bool
    requeues: int
    time: int | None
    env: Mapping[str, str]

    def __call__(self) -> JobOutcome:
        """Run the job.

        Raises:
            SystemExit: the job goes back to the queue and will be started again.
        """
        outcome = _BatchRun(self, Path(os.environ["SUBMITIT_FOLDER"])).run()
        if self.slurm and not outcome.ok:
            # For submitit a written result is a success; Slurm, and jobs that depend on this one, need the exit code.
            atexit.register(os._exit, outcome.code or 1)
        return outcome

    def checkpoint(self) -> Any:
        """The callable for submitit's next start of the job; None where the job may not start again."""
        from submitit.helpers import DelayedSubmission

        if not self.requeues:
            return None
        with contextlib.suppress(FileNotFoundError):
            return DelayedSubmission(replace(self, call=read_pickle(Path(os.environ["SUBMITIT_FOLDER"]) / CHECKPOINT)))
        return DelayedSubmission(self)

    def line(self, folder: Path) -> list[str]:
        """The hpcray-launch line."""
        line = module_line("hpcray.cli.launch", "-n", str(self.nodes), *(["--srun"] if self.slurm else []))
        driver = [] if self.call is None else ["-m", "hpcray.jobs.batch_launch", str(folder)]
        return [*line, *self.node.to_argv(), *driver]

    def environ(self) -> dict[str, str]:
        """The environment of the launch."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SUBMITIT_LOCAL_")}
        if "SLURM_CPUS_PER_TASK" in environ:
            # Since Slurm 22.05 a step gets one CPU per task unless it requests the job's number.
            environ.setdefault("SRUN_CPUS_PER_TASK", environ["SLURM_CPUS_PER_TASK"])
        if self.time is not None:
            environ["HPCRAY_END_TIME"] = str(time.time() + self.time)
        # This process requests the requeue: it counts the starts, and submitit must know the next callable.
        return {**environ, **self.env, "HPCRAY_REQUEUE": "exit"}


@contextlib.contextmanager
def sigterm_ignored() -> Iterator[None]:
    """Ignore SIGTERM in this process and its children. Slurm sends it to all processes of a requeued job, also to the
    scontrol that requested the requeue and still waits for the reply."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _BatchRun:
    def __init__(self, launch: BatchLaunch, folder: Path) -> None:
        self._launch = launch
        self._folder = folder
        self._ended_by = ""
        self._child: subprocess.Popen[bytes]

    def run(self) -> JobOutcome:
        launch, folder = self._launch, self._folder
        for name in (OUTCOME, CHECKPOINT, DRIVER):
            (folder / name).unlink(missing_ok=True)
        if launch.call is not None:
            write_pickle(folder / CALL, launch.call)
        if not launch.slurm:
            die_with_parent(os.getppid(), signal.SIGTERM)  # the controller, which this process outlives
        with _listening([TIME_IS_UP, signal.SIGTERM, signal.SIGINT]) as (wakeup, previous):
            self._start()
            try:
                if (folder / CANCELLED).exists():
                    self._on_signal(signal.SIGTERM)
                code = self._wait(wakeup)
            finally:
                self._end_launch()
        if code == _EXIT_DRAINED and not self._ended_by:
            self._ended_by = "time"  # hpcray itself noticed the approaching end
        outcome = self._outcome(code)
        if outcome.ok or not launch.requeues or not self._ended_from_outside():
            return outcome
        handler = previous[TIME_IS_UP]
        assert callable(handler), "submitit has a handler for the end of the time"
        with sigterm_ignored():
            handler(TIME_IS_UP, None)
        raise AssertionError("submitit did not leave")

    def _ended_from_outside(self) -> bool:
        """True if the time limit or a preemption ended the job. Preemption signals the step only, as scancel does."""
        if self._ended_by == "time":
            return True
        cancelled = (self._folder / CANCELLED).exists()
        return self._launch.slurm and not cancelled and batch_queues.preempted(os.environ.get("SLURM_JOB_ID", ""))

    def _start(self) -> None:
        me = os.getpid()
        self._child = subprocess.Popen(
            self._launch.line(self._folder),
            stdin=subprocess.DEVNULL,
            env=self._launch.environ(),
            preexec_fn=lambda: die_with_parent(me, signal.SIGTERM),
        )

    def _wait(self, wakeup: int) -> int:
        """Wait for the launch to end, handle signals meanwhile, and return its exit code; 128 + n for signal n."""
        ended = os.pidfd_open(self._child.pid)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(ended, selectors.EVENT_READ)
                selector.register(wakeup, selectors.EVENT_READ)
                while True:
                    ready = {key.fd for key, _ in selector.select()}
                    if wakeup in ready:
                        for number in os.read(wakeup, 256):
                            self._on_signal(number)
                    if ended in ready:
                        break
        finally:
            os.close(ended)
        status = self._child.wait()
        return 128 - status if status < 0 else status

    def _on_signal(self, number: int) -> None:
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
        """Signal the driver to write a checkpoint; False where no driver on this host can write one."""
        try:
            driver = json.loads(read_private_file(str(self._folder / DRIVER)))
        except (OSError, ValueError):
            return False
        found = ProcessIdentity.of(driver["pid"])
        if driver["host"] != socket.gethostname() or found is None or found.started != driver.get("started"):
            return False  # another process may have got its pid, and the signal would end it
        with contextlib.suppress(ProcessLookupError):
            os.kill(driver["pid"], TIME_IS_UP)
            return True
        return False

    def _end_launch(self) -> None:
        deadline = time.monotonic() + _LAUNCH_EXIT_TIMEOUT
        while self._child.poll() is None:
            if time.monotonic() > deadline:
                self._child.kill()
            else:
                self._child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_LAUNCH_EXIT_TIMEOUT / 2)

    def _outcome(self, code: int) -> JobOutcome:
        folder = self._folder
        (folder / CALL).unlink(missing_ok=True)
        (folder / DRIVER).unlink(missing_ok=True)
        if self._launch.call is None:
            return JobOutcome(EXIT, code, ended_by=self._ended_by)
        try:
            outcome: JobOutcome = read_pickle(folder / OUTCOME)
        except FileNotFoundError:
            return JobOutcome(LOST, code, ended_by=self._ended_by)
        (folder / OUTCOME).unlink()
        return replace(outcome, code=outcome.code or code, ended_by=self._ended_by)


@contextlib.contextmanager
def _listening(numbers: Sequence[signal.Signals]) -> Iterator[tuple[int, Mapping[signal.Signals, Any]]]:
    """A descriptor from which the numbers of arriving signals are read, and the previous handlers."""
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


def main(folder: Path) -> int:
    """Call the function, write its outcome, and return the exit code."""
    call: PickledCall = read_pickle(folder / CALL)
    try:
        function, args, kwargs = call.load()
        _offer_checkpoint(folder, function, args, kwargs)
        outcome = JobOutcome(VALUE, 0, cloudpickle.dumps(function(*args, **kwargs)))
    except _CheckpointTaken:
        return _EXIT_DRAINED
    except BaseException as error:  # SystemExit too is reported, not obeyed
        traceback.print_exc()
        failure = make_task_error(call.name, error, os.getpid(), node_ip_address(), dumps=cloudpickle.dumps)
        outcome = JobOutcome(ERROR, 1, cloudpickle.dumps(failure))
    write_pickle(folder / OUTCOME, outcome)
    return outcome.code


class _CheckpointTaken(BaseException):
    """Ends the function whose checkpoint is written. No `except Exception` of the user's code may stop it."""


def checkpoint_of(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The method that makes a checkpoint of a call, in submitit's two spellings; None where there is none."""
    found = getattr(function, "__submitit_checkpoint__", None) or getattr(function, "checkpoint", None)
    return found if callable(found) else None


def _offer_checkpoint(
    folder: Path, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Handle SIGUSR2: the function's own `checkpoint(*args, **kwargs)` then names the call for the next start."""
    checkpoint = checkpoint_of(function)
    if checkpoint is None:
        return

    def take(number: int, frame: FrameType | None) -> None:
        again = checkpoint(*args, **kwargs)
        if again is not None:
            name = getattr(again.function, "__name__", type(again.function).__name__)
            blob = cloudpickle.dumps((again.function, again.args, again.kwargs))
            write_pickle(folder / CHECKPOINT, PickledCall(name, tuple(sys.path), blob))
        raise _CheckpointTaken

    signal.signal(TIME_IS_UP, take)
    me = ProcessIdentity.of(os.getpid())
    known = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": me.started if me else 0})
    with contextlib.suppress(OSError):  # on a full disk the function runs, and its nodes drain in the end
        write_private_file(str(folder / DRIVER), known.encode())


def run_batch(folder: Path) -> int:
    """Be the batch process of a job in PBS or Flux. Returns its exit code."""
    for fd, stream in ((1, "out"), (2, "err")):
        log = append_private_file(str(folder / f"{STEM}_0_log.{stream}"))
        os.dup2(log, fd)
        os.close(log)
    os.environ["SUBMITIT_FOLDER"] = str(folder)
    result = folder / f"{STEM}_0_result.pkl"
    try:
        outcome = read_pickle(folder / LAUNCH)()
    except Exception:
        traceback.print_exc()
        write_pickle(result, ("error", traceback.format_exc()))
        return 1
    write_pickle(result, ("success", outcome))
    return 0 if outcome.ok else outcome.code or 1


if __name__ == "__main__":
    sys.exit((run_batch if sys.argv[2:] == [BATCH] else main)(Path(sys.argv[1])))
