"""The end of the job: time left, drain callbacks, checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar

from hpcray.api.session import leave_unfinished, require_session
from hpcray.common.ids import HEAD
from hpcray.platform import checkpoints
from hpcray.platform.allocation import end_time
from hpcray.platform.config_files import node_config
from hpcray.protocol.messages import DrainRequest
from hpcray.runtime.core_worker import drain_client
from hpcray.runtime.core_worker.actor_submitter import MARK
from hpcray.runtime.core_worker.core_worker import current
from hpcray.runtime.node.slurm_job import checkpoint_directory
from hpcray.runtime.node.slurm_job import restart_count as count_restarts

_Function = TypeVar("_Function", bound=Callable[..., Any])


def time_left() -> float | None:
    """Return the seconds until the batch system ends the job. Works in drivers, tasks and actors, and before `init()`.

    Returns:
        Seconds, at least 0; None where the end is unknown: no time limit, or no batch system.
    """
    process = current.process
    if process is not None:
        return drain_client.time_left(process.place.run)
    end = node_config(os.environ).end_time or end_time()
    return max(0.0, end - time.time()) if end else None


def draining() -> float | None:
    """Return the seconds until a draining job ends; None while the job does not drain. For polling in a loop.

    A program that has called `draining` gets the whole time to end by itself.
    """
    process = current.process
    if process is None:
        return None
    if not process.drain_client.takes_part:
        with process.engine.lock:
            process.drain_client.take_part()
    return process.drain_client.seconds_left() if process.drain_client.reason else None


def on_drain(function: _Function) -> _Function:
    """Register a function to call once when the job drains: `@on_drain` or `on_drain(f)`, before or after `init()`.

    The function runs in a thread of its own in the process that registered it, with the seconds that are left as its
    argument; the program continues meanwhile. Errors are printed. A method of an actor class can be decorated too: the
    actor calls `method(self, seconds)` between two of its calls.

    Returns:
        The function.

    Raises:
        TypeError: not a function, or a coroutine function that is no method.
    """
    if _is_method(function):
        setattr(function, MARK, True)
        return function
    drain_client.check_callback(function)
    if function not in drain_client.callbacks:
        drain_client.callbacks.append(function)
    process = current.process
    if process is not None:
        process.drain_client.register(function)
    return function


def drain(reason: str = "the program asked for it", seconds: float | None = None) -> None:
    """Start to drain the job, as a signal from Slurm does. Returns at once.

    Args:
        reason: text for the logs and errors of all processes.
        seconds: duration of the drain, at most the time that the job has left; by default the setting `drain_margin`.

    Raises:
        ValueError: `seconds` is not positive.
    """
    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds={seconds!r} is not a positive time; hint: how long the drain may take")
    process = require_session()
    with process.engine.lock:
        process.engine.send(HEAD, DrainRequest(reason, float(seconds or 0.0)))
        process.engine.flush()


def exit_unfinished() -> NoReturn:
    """End the program with work left to do, because the job ends.

    Actors write their checkpoints first. The exit code is the setting `drain_exit_code`, by default 75. Where the job
    drains and the setting `requeue` is "scontrol", hpcray requeues the job.
    """
    process = current.process
    if process is None:
        raise SystemExit(node_config(os.environ).drain_exit_code)
    leave_unfinished(process)


def restart_count() -> int:
    """Return how often this job was requeued; 0 in its first run."""
    process = current.process
    return process.place.run.restarts if process is not None else count_restarts(os.environ)


def checkpoint_dir() -> str:
    """Return the checkpoint directory of this job, the same in all its runs. The directory may not exist yet.

    The directory is HPCRAY_CHECKPOINT_DIR, else `hpcray-checkpoints/<job id>` in the directory of submission. All nodes
    must share it.

    Raises:
        RuntimeError: outside a Slurm job, without the variable.
    """
    process = current.process
    if process is not None:
        found = process.place.run.checkpoints
    else:
        found = checkpoint_directory(node_config(os.environ), os.environ)
    if not found:
        raise RuntimeError(
            "no checkpoint directory is known outside a Slurm job; hint: set HPCRAY_CHECKPOINT_DIR to one that all "
            "nodes share, another one for each experiment"
        )
    return found


def latest_checkpoint(name: str) -> str | None:
    """Return the path of the newest complete checkpoint of this name; None where there is none.

    Raises:
        RuntimeError: as `checkpoint_dir`.
    """
    return checkpoints.latest(checkpoint_dir(), checkpoints.directory_name(name))


def new_checkpoint(name: str) -> AbstractContextManager[str]:
    """Write a checkpoint: `with new_checkpoint("model") as directory:` provides an empty directory.

    When the block ends, the directory is flushed to disk and becomes the latest checkpoint of this name; the previous
    one is kept, older ones are removed. Where the block raises or the process dies, the previous checkpoint stays the
    latest. Checkpoints of an actor (`__hpcray_checkpoint__`) have the name of the actor.

    Raises:
        RuntimeError: as `checkpoint_dir`. OSError: the file system refuses.
    """
    return checkpoints.writing(checkpoint_dir(), checkpoints.directory_name(name))


def _is_method(function: Any) -> bool:
    """Return True for a function that is defined in the body of a class."""
    outer = getattr(function, "__qualname__", "").rpartition(".")[0]
    return bool(outer) and not outer.endswith("<locals>") and not hasattr(function, "__self__")
