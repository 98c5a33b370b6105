"""The processes of a nested MPI job on each of its nodes: the guard and the ranks.

`python -m hpcray.mpi.processes guard DIRECTORY FD` outlives the worker that started it by moments. It holds the lock of
the directory, whose loss ends the node's ranks. A line on its standard input is a launcher's command and environment
(JSON) to run; the exit code and the tail of the launcher's standard error go to descriptor FD. The end of its standard
input, also by the worker's death, ends all: launcher, descendants, directory.

`python -m hpcray.mpi.processes rank SPEC` is one rank, started by mpirun or srun. SPEC is JSON: "shares" (for each node
its directory, first rank and number of ranks), "srun" (whether srun starts the ranks), "one_host" (whether all ranks
are on one host).

`python -m hpcray.mpi.processes place SPEC` holds the place of a rank for a process that runs already
(`hpcray.mpi.nested_job`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from hpcray.common.exceptions import StartupError
from hpcray.common.task_errors import make_task_error
from hpcray.jobs import CALL, PickledCall, read_pickle, write_pickle
from hpcray.platform.launcher_environment import set_mpi_variables
from hpcray.platform.mpi_directory import MpiDirectory, memory_settings
from hpcray.platform.private_files import open_private_file, read_private_file, write_private_file
from hpcray.platform.process_control import become_subreaper, set_process_name
from hpcray.platform.process_tree import descendants, kill_descendants
from hpcray.platform.sockets import node_ip_address
from hpcray.transport.startup import (
    import_mpi,
    unlink_shared_memory,
    without_network,
    without_planted_settings,
)

_LOCK = "alive"
_MEMORY = "memory"
"""A file with the path of a private directory for the shared-memory files that MPI makes on this node."""
HELD = "held"
"""A file that the holder of places keeps locked for as long as they are to be held."""
_TAIL = 4000  # bytes of standard error that are kept
_LAUNCHER_EXIT_TIMEOUT = 5.0  # seconds
_DESCENDANTS_EXIT_TIMEOUT = 10.0  # seconds
_OF_A_RANK = ("OMPI_", "PMIX_", "PMI_", "PRTE_")  # names of variables
_NUMBERS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


class _JobGuard:
    def __init__(self, directory: Path, reply: int) -> None:
        self._directory = directory
        self._reply = reply
        self._child: subprocess.Popen[bytes] | None = None
        self._tail = b""
        self._memory = MpiDirectory.create()
        write_private_file(str(directory / _MEMORY), os.fsencode(self._memory.path))

    def serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            ended = -1
            request = b""
            while True:
                for key, _ in selector.select():
                    if key.fd == 0:
                        data = os.read(0, 1 << 16)
                        request += data
                        if not data:
                            return
                        if request.endswith(b"\n") and self._start(**json.loads(request)):
                            child = self._child
                            assert child is not None and child.stderr is not None
                            ended = os.pidfd_open(child.pid)
                            selector.register(ended, selectors.EVENT_READ)
                            selector.register(child.stderr, selectors.EVENT_READ)
                    elif key.fd == ended:
                        selector.unregister(ended)
                        os.close(ended)
                        self._finish(selector)
                    elif key.fd in selector.get_map():  # else `_finish` has read it to its end
                        self._forward_stderr(key.fd, selector)

    def _start(self, line: list[str], environ: dict[str, str]) -> bool:
        try:
            self._child = subprocess.Popen(line, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environ)
        except OSError as error:
            self._reply_with(127, f"cannot start {line[0]}: {error.strerror}")
            return False
        return True

    def _forward_stderr(self, fd: int, selector: selectors.BaseSelector) -> None:
        data = os.read(fd, 1 << 16)
        if not data:
            selector.unregister(fd)
        self._tail = (self._tail + data)[-_TAIL:]
        with contextlib.suppress(OSError):
            os.write(2, data)

    def _finish(self, selector: selectors.BaseSelector) -> None:
        """The launcher has ended: end the processes that its ranks left behind, which closes its standard error."""
        child = self._child
        assert child is not None and child.stderr is not None
        status = child.wait()
        _end_descendants()
        fd = child.stderr.fileno()
        while fd in selector.get_map():
            self._forward_stderr(fd, selector)
        self._reply_with(128 - status if status < 0 else status, self._tail.decode(errors="replace"))

    def _reply_with(self, code: int, tail: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._reply, json.dumps({"code": code, "tail": tail}).encode() + b"\n")

    def end(self) -> None:
        """End the launcher in its own way, so that it ends its ranks on other nodes too; then what is left."""
        child = self._child
        deadline = time.monotonic() + _LAUNCHER_EXIT_TIMEOUT
        while child is not None and child.poll() is None and time.monotonic() < deadline:
            child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_LAUNCHER_EXIT_TIMEOUT / 5)
        _end_descendants()
        self._memory.remove()
        shutil.rmtree(self._directory, ignore_errors=True)


def _end_descendants() -> None:
    deadline = time.monotonic() + _DESCENDANTS_EXIT_TIMEOUT
    me = os.getpid()
    while descendants(me) and time.monotonic() < deadline:
        kill_descendants(me)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)


def run_guard(directory: Path, reply: int) -> None:
    """Be the guard: serve until the end."""
    set_process_name("hpcray-mpi")
    become_subreaper()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lock = open_private_file(str(directory / _LOCK), os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    guard = _JobGuard(directory, reply)
    os.write(reply, b"{}\n")
    try:
        guard.serve()
    finally:
        guard.end()


def find_directory(shares: list[list[Any]], environ: Mapping[str, str]) -> Path:
    """The directory of this rank's node. Where several nodes are on this host any of them will do."""
    number = _rank_number(environ)
    mine = [path for path, first, count in shares if first <= number < first + count]
    for path in [*mine, *(path for path, _, _ in shares)]:
        if os.path.isdir(path):
            return Path(path)
    raise StartupError(f"MPI rank {number} runs on {socket.gethostname()}, which none of the reserved nodes is on")


def _rank_number(environ: Mapping[str, str]) -> int:
    return next((int(environ[name]) for name in _NUMBERS if environ.get(name, "").isdecimal()), 0)


def run_place(text: str) -> None:
    """Hold the place of one rank: write down what the launcher gave it, and end when the node's holder says so."""
    spec = json.loads(text)
    directory = find_directory(spec["shares"], os.environ)
    threading.Thread(target=_end_with_job, args=(directory,), daemon=True).start()
    given = {name: value for name, value in os.environ.items() if name.startswith(_OF_A_RANK)}
    write_pickle(place_file(directory, _rank_number(os.environ)), {**spec, "environ": given})
    with os.fdopen(open_private_file(str(directory / HELD))) as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def place_file(directory: Path, rank: int) -> Path:
    """The file that a rank's place is written to."""
    return directory / f"place{rank}.pkl"


def run_rank(text: str) -> NoReturn:
    """Run the call as one rank, and exit."""
    spec = json.loads(text)
    directory = find_directory(spec["shares"], os.environ)
    threading.Thread(target=_end_with_job, args=(directory,), daemon=True).start()
    set_mpi_variables(os.environ, under_srun=spec["srun"])
    # hpcray.init() in a rank joins the job, and commands look there: the inherited session may be another node's.
    os.environ["HPCRAY_ADDRESS"] = os.environ["HPCRAY_SESSION"] = str(directory.parent)
    module = start_mpi(spec["one_host"], directory)
    comm = module.COMM_WORLD
    rank, size = comm.Get_rank(), sum(count for _, _, count in spec["shares"])
    call: PickledCall = read_pickle(directory / CALL)
    result = directory / f"r{rank}.pkl"  # ("value", pickle) or ("error", pickle, Unix time)
    try:
        if comm.Get_size() != size:
            raise StartupError(
                f"this MPI rank sees a world of {comm.Get_size()} ranks and not {size}; hint: mpi4py belongs to "
                "another MPI than the launcher, see `hpcray doctor`"
            )
        function, args, kwargs = call.load()
        blob = cloudpickle.dumps(function(comm, *args, **kwargs))
        pickle.loads(blob)
    except BaseException as error:  # SystemExit too: a rank that leaves alone is an error
        name = f"{call.name} on MPI rank {rank} of {size}"
        failure = make_task_error(name, error, os.getpid(), node_ip_address(), dumps=cloudpickle.dumps)
        failure.rank = rank  # type: ignore[attr-defined]
        write_pickle(result, ("error", cloudpickle.dumps(failure), time.time()))
        sys.stdout.flush()
        comm.Abort(1)
    write_pickle(result, ("value", blob))
    module.Finalize()
    sys.exit(0)


def start_mpi(one_host: bool, directory: Path) -> Any:
    """Start MPI as a user's program would; open no port where none is needed, leave no file after a kill.

    Args:
        one_host: whether all ranks are on this host.
        directory: of the job on this node.
    """
    module = import_mpi()
    memory = os.fsdecode(read_private_file(str(directory / _MEMORY)))
    os.environ.update(memory_settings(memory, os.environ))
    with without_network(one_host), without_planted_settings():
        module.Init_thread(module.THREAD_MULTIPLE)
    unlink_shared_memory(module, module.COMM_WORLD)
    return module


def _end_with_job(directory: Path) -> None:
    """Die as soon as the guard's lock is free: the worker that reserved this node's CPUs, or the guard, is gone."""
    try:
        with os.fdopen(open_private_file(str(directory / _LOCK))) as file:
            fcntl.flock(file, fcntl.LOCK_SH)
    except OSError:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "guard":
        run_guard(Path(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1] == "place":
        run_place(sys.argv[2])
    else:
        run_rank(sys.argv[2])
