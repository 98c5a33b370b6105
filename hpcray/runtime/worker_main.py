"""A worker's life, from the fork to its last task."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType
from typing import NoReturn

from hpcray.host.emergency import stay_visible
from hpcray.runtime.early_thread import EarlyThread
from hpcray.runtime.environment import Environment
from hpcray.runtime.links import listen
from hpcray.runtime.output import finish_output, prefix_output, redirect_output
from hpcray.runtime.process import connect
from hpcray.runtime.refs import current
from hpcray.runtime.worker import Worker


def _leave(code: int) -> None:
    """The job is over, or our raylet wants us gone."""
    finish_output()
    os._exit(code)


def _not_ours(number: int, frame: FrameType | None) -> None:
    """A handler, not SIG_IGN, which programs that a task starts would inherit."""


def worker_main(session_dir: str, number: int, arena_fd: int, environment: Environment | None = None) -> NoReturn:
    """Body of a forked worker. environment: its runtime_env, where its Python has taken the place of the forked one."""
    with contextlib.suppress(OSError):
        os.close(arena_fd)  # Welcome brings one
    if environment is None:
        environment = Environment.take(os.environ)
        environment.become_python(session_dir, number)
    stay_visible()
    # Where there is no room for one more thread, our raylet must never hear of us: it would give us work.
    thread = EarlyThread("hpcray-io")
    # Peers may connect as soon as our raylet knows that we are up: the socket comes first.
    listener = listen(session_dir, number)
    process = connect(session_dir, "worker")
    process.engine.adopt(thread)
    worker = Worker(process, environment)
    current.process = process
    current.worker = worker
    signal.signal(signal.SIGINT, worker.interrupted)
    if process.config.log_to_driver:
        program = process.config.driver_rank if process.cluster_size > 1 else 0
        prefix_output(process.local, process.node != program)
        process.on_exit = _leave
    else:
        redirect_output(f"{session_dir}/worker-{number}.log")
    for number in process.run.signals:
        signal.signal(number, _not_ours)  # some batch systems send them to every process of a job
    process.start(listener)
    environment.set_up(worker)
    worker.serve()
