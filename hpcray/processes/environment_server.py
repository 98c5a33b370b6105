"""The fork server of one environment: the interpreter that its workers are forked from.

It starts as a worker of the environment would, and then forks workers instead of being one (see
`platform.fork_server`).
"""

from __future__ import annotations

import os
import socket
import sys
from typing import NoReturn

from hpcray.common.resources import ASSIGNED_ACCELERATORS, ASSIGNED_GPUS
from hpcray.platform.fork_server import Environment, run_environment_server
from hpcray.platform.numa_binding import limit_loaded_libraries_to_one_thread
from hpcray.processes.worker_main import worker_main
from hpcray.runtime_env.runtime_env import PYTHON_FIELDS, RUNTIME_ENV_VARIABLE, STARTED_WITH
from hpcray.runtime_env.worker_runtime_env import WorkerRuntimeEnv

_NAMED = tuple(f'"{field}"' for field in (*PYTHON_FIELDS, STARTED_WITH))


def needs_server(env: Environment) -> bool:
    """True if workers of the environment may be other than forks of the node's fork server. Those with devices, few and
    bound to cores of their own, start by themselves."""
    for name, text in env:
        if name == RUNTIME_ENV_VARIABLE:
            return env[-1][0] not in (ASSIGNED_GPUS, ASSIGNED_ACCELERATORS) and any(field in text for field in _NAMED)
    return False


def be_server(session_dir: str, fd: int) -> str:
    """Become the server of the environment that `os.environ` holds. Returns why this process cannot.

    Args:
        session_dir: the session directory of this node.
        fd: of the packet socket to the node's fork server, inheritable.
    """
    environment = WorkerRuntimeEnv.take(os.environ)
    if not environment.alike:
        return "each worker is set up by itself"
    environment.become_python(session_dir, fd, __name__)
    return environment.problem or "its workers are forks of the node's fork server"


def other_python_main(session_dir: str, fd: str, kept: str) -> None:
    """The server's life, in the interpreter that took the place of the forked process."""
    sock = socket.socket(fileno=int(fd))
    sock.set_inheritable(False)
    environment = WorkerRuntimeEnv.handed_over(kept)
    os.environ.pop(RUNTIME_ENV_VARIABLE, None)
    del sys.argv[1:]  # ours: a program that parses its arguments in a task must not see them
    limit_loaded_libraries_to_one_thread()

    def main(session_dir: str, number: int, arena_fd: int) -> NoReturn:
        worker_main(session_dir, number, arena_fd, environment)

    run_environment_server(sock, main, session_dir)
