"""A worker's life, from the fork to its last task."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any, NoReturn

from hpcray.core.core_worker.object_table import Waiter
from hpcray.diagnostics.introspection import ObjectInventory
from hpcray.platform.launcher_environment import JobVariables
from hpcray.platform.numa_binding import limit_loaded_libraries_to_one_thread
from hpcray.platform.process_control import set_process_name
from hpcray.platform.process_tree import PrestartedThread, let_kernel_kill_first
from hpcray.platform.stacks import enable_stack_dump
from hpcray.processes.features import FEATURES
from hpcray.runtime.core_worker.core_worker import connect, current
from hpcray.runtime.core_worker.interruptions import defer_interruptions
from hpcray.runtime.core_worker.io_engine import IoEngine
from hpcray.runtime.core_worker.peer_sockets import listen
from hpcray.runtime.worker.log_output import finish_output, write_to_log_files
from hpcray.runtime.worker.task_executor import TaskExecutor, in_user_code
from hpcray.runtime_env.worker_runtime_env import WorkerRuntimeEnv

# ------------------------------------------------------------ signal watch
# Signals that come just before the main thread of a worker begins to wait.


_READ = 512


class SignalWatch:
    """Ends the wait of the main thread for a moment when a signal comes, so that Python calls the signal's handler.

    Python calls handlers between two instructions of the main thread. A signal that the kernel delivers after the last
    one before a wait, or to another thread, interrupts no system call: without this it would wait for the next message.

    Args:
        engine: of this process. Create this on the main thread.
        idle: returns what the main thread waits for while it has no work; None while it has.
    """

    def __init__(self, engine: IoEngine, idle: Callable[[], Waiter | None]) -> None:
        self._engine, self._idle, self._main = engine, idle, get_ident()
        self._read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        engine.watched.use(self._read, self._signalled)
        engine.busy_poll.arm(self._read, again=False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def _signalled(self) -> None:
        """Called by whoever drives; the main thread has been woken if that is who does."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, _READ)
        self._engine.busy_poll.arm(self._read, again=True)
        if get_ident() == self._main:
            return
        parked = self._engine.parked
        for waiter in (self._engine.park_of.get(self._main), self._idle()):
            if waiter is not None and waiter.lock is not None:
                if waiter in parked:
                    parked.remove(waiter)  # it parks again; until then nothing is handed to it
                with contextlib.suppress(RuntimeError):  # it has been woken already
                    waiter.lock.release()


# ------------------------------------------------------------ worker main


def _leave(code: int) -> None:
    """The job is over, or our raylet wants us gone."""
    finish_output()
    os._exit(code)


def _not_ours(number: int, frame: FrameType | None) -> None:
    """A handler, not SIG_IGN, which programs that a task starts would inherit."""


def _breakpoint(*args: Any, **kwargs: Any) -> Any:
    """`breakpoint()` in a task: `hpcray debug` attaches to it, unless PYTHONBREAKPOINT names something else."""
    if os.environ.get("PYTHONBREAKPOINT"):
        return sys.__breakpointhook__(*args, **kwargs)
    from hpcray.diagnostics.debugger import set_trace  # it loads pdb, and few tasks stop

    return set_trace(sys._getframe(1), *args, **kwargs)


def worker_main(session_dir: str, number: int, arena_fd: int, environment: WorkerRuntimeEnv | None = None) -> NoReturn:
    """Body of a forked worker. environment: its runtime_env, where its Python has taken the place of the forked one."""
    with contextlib.suppress(OSError):
        os.close(arena_fd)  # Welcome brings one
    if environment is None:
        environment = WorkerRuntimeEnv.take(os.environ)
        environment.become_python(session_dir, number, __name__)
    let_kernel_kill_first()
    enable_stack_dump()
    with contextlib.suppress(OSError):
        faulthandler.enable(2, all_threads=False)  # a crash in C shows the Python stack in the worker's output
    # Where there is no room for one more thread, our raylet must never hear of us: it would give us work.
    thread = PrestartedThread("hpcray-io")
    # Peers may connect as soon as our raylet knows that we are up: the socket comes first.
    listener = listen(session_dir, number)
    executor = partial(TaskExecutor, environment=environment)
    process = connect(session_dir, "worker", ObjectInventory, FEATURES, executor, listener, thread)
    worker = process.executor
    assert isinstance(worker, TaskExecutor)
    current.process = process
    current.worker = worker
    JobVariables(os.environ, session_dir)
    signal.signal(signal.SIGINT, worker.interrupted)
    signal.signal(signal.SIGTERM, worker.terminated)
    SignalWatch(process.engine, worker.awaited)
    sys.breakpointhook = _breakpoint
    report_lost_output = write_to_log_files(process, worker)
    process.exit_listeners.append(_leave)
    for number in process.place.run.signals:
        signal.signal(number, _not_ours)  # some batch systems send them to every process of a job
    process.start(worker.handlers)
    report_lost_output()
    defer_interruptions(process.engine, lambda frame: not in_user_code(frame))
    environment.set_up(worker)
    worker.serve()


def other_python_main(session_dir: str, number: str, kept: str) -> None:
    """A worker's life in a Python that took its place."""
    environment = WorkerRuntimeEnv.handed_over(kept)
    del sys.argv[1:]  # ours: a program that parses its arguments in a task must not see them
    set_process_name("hpcray-worker")
    limit_loaded_libraries_to_one_thread()
    worker_main(session_dir, int(number), -1, environment)
