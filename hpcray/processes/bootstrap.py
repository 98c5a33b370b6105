"""How `hpcray.init()` of a user's process gets a raylet: attach to a running one, or start one as a child process.

Inside a launcher (`mpirun -n 4 python script.py`) every rank's `init()` starts the raylet of its node. Rank 0 goes on
as the driver; the others wait for the end of the job and never come back from `enter`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import MutableMapping
from typing import NoReturn

import msgspec

from hpcray.common.exceptions import StartupError
from hpcray.platform.process_tree import forward_signals
from hpcray.platform.resource_limits import open_standard_descriptors
from hpcray.platform.session_directory import ADDRESS, read_session, remove_dead_sessions
from hpcray.processes.running_jobs import NoRunningJobError, find_running_job
from hpcray.protocol.messages import ATTACHED, DRIVER
from hpcray.runtime.node.options import NodeOptions
from hpcray.runtime.node.slurm_job import RayletReady, drain_signals
from hpcray.transport.startup import Launch, read_launch

_LEAVING = 8.0
"""Seconds that a raylet has to end after its driver, before it is killed."""

# The child imports hpcray from where this process did, and nothing from the user's current directory. To start sooner
# it skips the imports of `import hpcray` that are for users' programs (`raylet_main.load_worker` does them), unless a
# sitecustomize has done them already: modules that it has would be lacking in another module `hpcray`.
_COMMAND = (
    "import sys; sys.path[0:1] = []; root = {root!r}; root in sys.path or sys.path.append(root); "
    "from importlib.util import find_spec, module_from_spec; "
    "sys.modules.setdefault('hpcray', module_from_spec(find_spec('hpcray'))); "
    "from hpcray.processes.raylet_main import main; main()"
)


class ClusterEntry(msgspec.Struct):
    """The session to connect to.

    Attributes:
        session_dir: the session directory of the node to join.
        kind: "driver" when the job is this process's, else "attached".
        node: the raylet that was started for it, if one was.
        for_children: the `init()` of processes that this one starts joins it too.
    """

    session_dir: str
    kind: str
    node: NodeChild | None = None
    for_children: bool = False


class NodeChild:
    """A raylet that runs as a child of this process and does not outlive it."""

    def __init__(self, options: NodeOptions) -> None:
        """Start it and wait until the node (under a launcher: the whole cluster) is up.

        Raises:
            StartupError: it is not up within `start_timeout`, or ended; nothing of it is left.
            ValueError: an option is not valid.
        """
        self.session_dir = ""
        timeout = options.settings().start_timeout
        ready_read, ready_write = os.pipe2(os.O_CLOEXEC)
        life_read, self._life = os.pipe2(os.O_CLOEXEC)
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        command = [
            sys.executable,
            "-c",
            _COMMAND.format(root=root),
            "hpcray-raylet",
            msgspec.json.encode(options).decode(),
            str(ready_write),
            str(life_read),
        ]
        try:
            # In its own session: a Ctrl-C at the terminal is for the driver, which then ends the raylet.
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(ready_write, life_read), start_new_session=True
            )
        except OSError as error:
            os.close(self._life)
            raise StartupError(f"cannot start the raylet process: {error}") from error
        finally:
            os.close(ready_write)
            os.close(life_read)
            if sys.exc_info()[0] is not None:
                os.close(ready_read)
        try:
            self.session_dir = self._wait_ready(ready_read, timeout)
        except BaseException:
            self.leave(1.0)
            raise
        finally:
            os.close(ready_read)

    @property
    def pid(self) -> int:
        """Pid of the raylet."""
        return self._child.pid

    def wait(self, timeout: float | None = None) -> int | None:
        """Return its exit code once it has ended; None when it has not within `timeout` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._child.wait(timeout)
        return None

    def leave(self, timeout: float = _LEAVING) -> int:
        """End the raylet, and its node with it; after the driver has sent Exit, or to break off.

        Returns:
            Its exit code; -9 when it did not end in time and was killed (its template then cleans up).
        """
        if self._life >= 0:
            os.close(self._life)
            self._life = -1
        code = self.wait(timeout)
        if code is None:
            self._child.kill()
            code = self._child.wait()
        if code < 0:
            remove_dead_sessions(os.environ)  # its fork server may have been killed too
        return code

    def _wait_ready(self, fd: int, timeout: float) -> str:
        # The raylet has the same deadline and knows more about the cause: its report comes first.
        deadline = time.monotonic() + timeout + 2.0
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        report = b""
        while True:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise StartupError(f"the raylet process was not ready within {timeout:g} s; hint: HPCRAY_START_TIMEOUT")
            more = os.read(fd, 65536)
            if not more:
                break
            report += more
        if not report:
            code = self._child.wait()
            remove_dead_sessions(os.environ)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise StartupError(f"the raylet process ended before it was ready ({how}); its error output tells why")
        ready = msgspec.json.decode(report, type=RayletReady)
        if ready.error:
            raise StartupError(ready.error, reported_by="rank0" if ready.reported_by_rank0 else "self")
        return ready.session_dir


def enter(address: str | None, options: NodeOptions, environ: MutableMapping[str, str] | None = None) -> ClusterEntry:
    """Find or start the node that this process joins.

    Args:
        address: None (what HPCRAY_ADDRESS says, else start one), "local" (start one, whatever the environment says),
            "auto" (the job that `find_running_job` finds), or a session directory.
        options: of the node, when one is started.

    Raises:
        ConnectionError: there is nothing to attach to, or more than one job could be meant.
        StartupError: the node or the cluster did not come up.
        ValueError: an option or the address is not valid.
    """
    open_standard_descriptors()
    environ = os.environ if environ is None else environ
    if address is None:
        address = environ.get(ADDRESS)
    if address == "auto":
        try:
            return ClusterEntry(find_running_job(None, environ), ATTACHED)
        except NoRunningJobError as error:
            raise ConnectionError(
                f"{error}. Without an address (argument, RAY_ADDRESS) init() starts a node of its own"
            ) from None
    if address is not None and address != "local":
        if not os.path.isabs(address):
            raise ValueError(
                f"address {address!r} is not valid; hint: the argument (or RAY_ADDRESS) is None, 'auto', 'local', or "
                "the path of a session directory. There are no ports"
            )
        try:
            return ClusterEntry(read_session(address).path, ATTACHED)
        except StartupError as error:
            raise ConnectionError(str(error)) from None
    launch = read_launch(environ) if address is None else Launch()
    if launch.size == 1:
        if not launch.kind and address is None and (nodes := environ.get("SLURM_JOB_NUM_NODES", "1")) != "1":
            print(
                f"hpcray: this is one node of the {nodes} that Slurm job {environ.get('SLURM_JOB_ID', '')} has; "
                f"hint: hpcray-launch --srun uses them all, init(address='local') says that one is meant",
                file=sys.stderr,
                flush=True,
            )
        node = NodeChild(options)
        return ClusterEntry(node.session_dir, DRIVER, node)
    return _enter_as_rank(launch, options, environ)


def _enter_as_rank(launch: Launch, options: NodeOptions, environ: MutableMapping[str, str]) -> ClusterEntry:
    """Start this rank's raylet; rank 0, or the driver's rank, goes on, the others serve the job to its end."""
    global _rank_used
    if _rank_used:
        raise StartupError(
            f"hpcray.init() a second time in rank {launch.rank} of {launch.kind}: its other ranks have left with the "
            "first job. hint: keep one session for the whole script, or init(address='local') for a node of its own"
        )
    _refuse_second_mpi(launch)
    _rank_used = True
    try:
        node = NodeChild(msgspec.structs.replace(options, distributed=True))
    except StartupError as error:
        if error.reported_by == "rank0":
            _leave(0)  # mpirun ends all ranks at the first other code, before rank 0 has reported the error
        raise
    if launch.rank == options.settings().driver_rank:
        # Processes that the driver starts belong to this job; they are no ranks themselves.
        return ClusterEntry(node.session_dir, DRIVER, node, for_children=True)
    forward_signals(node.pid, drain_signals(options.settings(), launch, environ))
    _outlive_user_signals()
    return _leave(node.wait() or 0)


def _leave(code: int) -> NoReturn:
    """End this rank. Not sys.exit: only rank 0 runs the rest of the user's script, its `finally` clauses included."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _refuse_second_mpi(launch: Launch) -> None:
    """Refuse a program that has started MPI: a rank can do so in one process only, and that is the raylet."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized():
        return
    if launch.rank != 0:
        _leave(0)
    raise StartupError(
        "this program has started MPI itself (from mpi4py import MPI) before hpcray.init(), and MPI starts only once "
        "in a rank; hint: python -m hpcray script.py, or mpi4py.rc.initialize = False before that import"
    )


def _outlive_user_signals() -> None:
    """Ignore the signals that launchers and batch systems send to all ranks: the script's handlers are for rank 0."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.SIG_IGN)


_rank_used = False
