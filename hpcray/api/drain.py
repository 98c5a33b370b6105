"""The end of the job that Slurm announces: how much time is left, what to do when it comes near, and checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar

from hpcray.api.session import ensure, leave_unfinished
from hpcray.base.config import Config
from hpcray.base.ids import HEAD
from hpcray.host import checkpoints
from hpcray.host.allocation import end_time
from hpcray.runtime import ending
from hpcray.runtime.actor_kinds import MARK
from hpcray.runtime.refs import current
from hpcray.runtime.run_info import checkpoint_directory
from hpcray.runtime.run_info import restart_count as count_restarts
from hpcray.wire.messages import DrainRequest

_Function = TypeVar("_Function", bound=Callable[..., Any])


def time_left() -> float | None:
    """Seconds until the batch system ends the job, not below 0. In drivers, tasks and actors; also before `init()`.

    Returns:
        None where the end is not known: no time limit, or no batch system.
    """
    process = current.process
    if process is not None:
        return ending.time_left(process.run)
    end = Config.from_env().end_time or end_time()
    return max(0.0, end - time.time()) if end else None


def draining() -> float | None:
    """Seconds until the job is ended, while it drains; None while it does not. For loops that look.

    A program that has called this is given the whole time to end by itself.
    """
    process = current.process
    if process is None:
        return None
    if not process.ending.interested:
        with process.engine.lock:
            process.ending.take_interest()
    return process.ending.left() if process.ending.reason else None


def on_drain(function: _Function) -> _Function:
    """Have a function called once when the job drains: `@on_drain` or `on_drain(f)`, before or after `init()`.

    It is called with the seconds that are left, in a thread of its own: the program goes on meanwhile. Errors are
    printed. A method of an actor class may be decorated too: it is called as `method(self, seconds)` between two of
    the actor's calls. What is registered in a driver is called there, in a task or actor in its worker process.

    Raises:
        TypeError: not a function, or a coroutine function that is no method.
    """
    if _is_method(function):
        setattr(function, MARK, True)
        return function
    ending.check_callback(function)
    if function not in ending.callbacks:
        ending.callbacks.append(function)
    process = current.process
    if process is not None:
        process.ending.register(function)
    return function


def drain(reason: str = "the program asked for it", seconds: float | None = None) -> None:
    """Begin to end the job in good order, as a signal from Slurm would. Returns at once.

    Args:
        reason: told to everybody.
        seconds: how long it may take; by default the setting `drain_margin`. Never more than the job has left.

    Raises:
        ValueError: `seconds` is not positive.
    """
    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds={seconds!r} is not a positive time; hint: how long the drain may take")
    process = ensure()
    with process.engine.lock:
        process.engine.send(HEAD, DrainRequest(reason, float(seconds or 0.0)))
        process.engine.flush()


def exit_unfinished() -> NoReturn:
    """End the program because the job ends, with work left to do.

    The exit code says so (75, setting `drain_exit_code`). Actors write their checkpoints first. Where the job drains
    and the setting is `requeue=scontrol`, Slurm is asked to run it again.
    """
    process = current.process
    if process is None:
        raise SystemExit(Config.from_env().drain_exit_code)
    leave_unfinished(process)


def restart_count() -> int:
    """How often this job was requeued: 0 in its first run."""
    process = current.process
    return process.run.restarts if process is not None else count_restarts(os.environ)


def checkpoint_dir() -> str:
    """The directory of this job's checkpoints, the same in all its runs: HPCRAY_CHECKPOINT_DIR, else
    `hpcray-checkpoints/<job id>` where the job was submitted. It may not exist yet. All nodes must see the same one.

    Raises:
        RuntimeError: outside a Slurm job, without the variable.
    """
    process = current.process
    found = process.run.checkpoints if process is not None else checkpoint_directory(Config.from_env(), os.environ)
    if not found:
        raise RuntimeError(
            "no checkpoint directory is known outside a Slurm job; hint: set HPCRAY_CHECKPOINT_DIR to one that all "
            "nodes share, another one for each experiment"
        )
    return found


def latest_checkpoint(name: str) -> str | None:
    """Path of the newest complete checkpoint of this name, whoever wrote it; None where there is none.

    Raises:
        RuntimeError: as `checkpoint_dir`.
    """
    return checkpoints.latest(checkpoint_dir(), checkpoints.directory_name(name))


def new_checkpoint(name: str) -> AbstractContextManager[str]:
    """`with new_checkpoint("model") as directory:` gives an empty directory to write to.

    When the block ends well, it is on the disk and from then on the latest checkpoint of this name; the one before
    it is kept, older ones are removed. When the block raises, or the process dies in it, nothing has changed. An
    actor's own checkpoints (`__hpcray_checkpoint__`) are those of the actor's name.

    Raises:
        RuntimeError: as `checkpoint_dir`. OSError: the file system refuses.
    """
    return checkpoints.writing(checkpoint_dir(), checkpoints.directory_name(name))


def _is_method(function: Any) -> bool:
    """Whether it is defined in the body of a class."""
    outer = getattr(function, "__qualname__", "").rpartition(".")[0]
    return bool(outer) and not outer.endswith("<locals>") and not hasattr(function, "__self__")
