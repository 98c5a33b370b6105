"""The actor that runs the entrypoint of one submitted job."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any

from hpcray.api.actor import exit_actor
from hpcray.common.config import RAY_LIBRARIES
from hpcray.common.job_names import (
    JOB_CONFIG_VARIABLE,
    JOB_ID_METADATA_KEY,
    JOB_LOGS_PATH_TEMPLATE,
    JOB_NAME_METADATA_KEY,
    logs_directory,
)
from hpcray.common.ray_version import STANDIN
from hpcray.platform.accelerators import gpu_visibility_state
from hpcray.platform.numa_binding import OMP_NUM_THREADS
from hpcray.platform.private_files import append_private_file, make_private_directory, open_private_file
from hpcray.platform.process_tree import ProcessIdentity, descendants
from hpcray.platform.session_directory import ADDRESS
from hpcray.runtime.core_worker.core_worker import CoreWorker, current
from hpcray.runtime_env.runtime_env import DEFAULT_SETUP_TIMEOUT
from hpcray.runtime_env.runtime_env_setup import set_up_python, unpack_package
from hpcray.state.job_table import JobErrorType, JobInfo, JobStatus, JobTable, start_timeout_problem

# ------------------------------------------------------------ entrypoint
# A shell command with all processes that it starts, of which none outlives the process that supervises it.


_POLL = 0.05  # seconds between looks at processes that shall end
# It reads until the supervisor's end of the pipe is closed, whatever ended the supervisor.
_GUARD = 'read _; kill -9 "-$0"'
# The command begins when it is told to, which is when the guard watches: a supervisor killed between the two starts
# would leave it running.
_GATED = 'read _ || exit; exec /bin/sh -c "$0" </dev/null'


class Entrypoint:
    """A running command.

    Args:
        command: for the shell.
        log: the file for its output.
        environ: its environment.
        directory: where it runs; None for the current one.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: str, log: IO[bytes], environ: Mapping[str, str], directory: str | None) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # of this thread; the child inherits it
        # A group of its own: a script may end its group (`kill 0`), which must not be ours.
        self._child = subprocess.Popen(
            ["/bin/sh", "-c", _GATED, command], start_new_session=True, env=environ, cwd=directory,
            stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, str(self._child.pid)], start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except BaseException:
            self._kill_group()
            raise
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._child.stdin as gate:  # killed already: wait() says so
            gate.write(b"\n")

    def wait(self) -> int:
        """Wait for the end of the command, and end what it has left behind. Returns the exit code, or minus a signal's
        number."""
        # Until it is reaped nobody else gets its pid, which is the number of the group.
        os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        self._kill_group()
        code = self._child.wait()
        self._guard.kill()
        self._guard.wait()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        return code

    def stop(self, number: int, patience: float) -> bool:
        """Signal all processes of the command; SIGKILL those that still run after `patience` seconds.

        Returns:
            True if none had to be killed.
        """
        pids = [self._child.pid, *descendants(self._child.pid)]
        found = [one for one in map(ProcessIdentity.of, pids) if one is not None]
        _send(found, number)
        deadline = time.monotonic() + patience
        while (living := [one for one in found if one.alive]) and time.monotonic() < deadline:
            time.sleep(_POLL)
        _send(living, signal.SIGKILL)
        return not living

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)


def _send(processes: Iterable[ProcessIdentity], number: int) -> None:
    for process in processes:
        if process.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


# ------------------------------------------------------------ job supervisor


_STOP_SIGNALS = ("SIGINT", "SIGTERM")
_STOP_PATIENCE = "3"  # seconds
_LAST_LINES, _LAST_CHARACTERS = 10, 20_000
logger = logging.getLogger(__name__)


class JobSupervisor:
    """Starts the entrypoint when it is made, reports its state, and leaves with it.

    Args:
        submission_id: id of the job, which is in the table of jobs.
        packages: digests of the packages that the job was submitted with: "working_dir" and "py_modules".
        runtime_env: of the driver, without packages.
        libraries: the directory of Ray's libraries, where the cluster has none; "" for none.
    """

    def __init__(
        self, submission_id: str, packages: dict[str, list[str]], runtime_env: dict[str, Any], libraries: str
    ) -> None:
        process = current.process
        assert process is not None
        self._process: CoreWorker = process
        self._submission_id, self._packages, self._libraries = submission_id, packages, libraries
        self._runtime_env = runtime_env
        self._table = JobTable(process)
        self._lock = threading.Lock()
        self._entrypoint: Entrypoint | None = None
        self._stopping: threading.Thread | None = None
        self._stop_requested = False
        threading.Thread(target=self._run, name=f"job {submission_id}", daemon=True).start()

    def stop(self) -> None:
        """End the entrypoint, soon."""
        with self._lock:
            self._stop_requested = True
            if self._entrypoint is None or self._stopping is not None:
                return
            self._stopping = threading.Thread(target=_stop, args=(self._submission_id, self._entrypoint), daemon=True)
            self._stopping.start()

    def _run(self) -> None:
        try:
            info = self._table.get(self._submission_id)
            if info is not None and info.status is JobStatus.PENDING:
                self._supervise(info)
        except Exception:
            text = traceback.format_exc()
            logger.error("job %s: %s", self._submission_id, text)
            self._fail(text, JobErrorType.JOB_ENTRYPOINT_COMMAND_START_ERROR)
        finally:
            exit_actor()

    def _supervise(self, info: JobInfo) -> None:
        if late := start_timeout_problem(info):
            self._fail(late, JobErrorType.JOB_SUPERVISOR_ACTOR_START_TIMEOUT)
            return
        path, file = self._open_log()
        with os.fdopen(file, "ab", buffering=0) as log:
            now = time.time()
            stamp = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))},{int(now * 1000) % 1000:03}"
            _note(log, f"{stamp}\tINFO {os.path.basename(__file__)} -- Runtime env is setting up.\n")
            try:
                variables = self._variables_of_python()
                working_dir, modules, paths = self._unpacked()
            except Exception as error:
                text = f"runtime_env setup failed: {error}"
                _note(log, text)
                self._fail(text, JobErrorType.RUNTIME_ENV_SETUP_FAILURE)
                return
            self._table.change(self._submission_id, JobStatus.RUNNING, driver_node_id=self._process.place.node_id)
            _note(log, f"Running entrypoint for job {self._submission_id}: {info.entrypoint}\n")
            environ = {**self._environ(info, working_dir, modules, paths), **variables}
            with self._lock:
                if not self._stop_requested:
                    self._entrypoint = Entrypoint(info.entrypoint, log, environ, working_dir or None)
        code = self._entrypoint.wait() if self._entrypoint is not None else 0
        with self._lock:
            stopping = self._stopping
        if stopping is not None:
            stopping.join()
        self._report(code, path)

    def _open_log(self) -> tuple[str, int]:
        """The path of the job's log, and its descriptor. Where it cannot be made, the job runs, and what it prints is
        lost."""
        directory = logs_directory(self._process.place.session_dir)
        path = os.path.join(directory, JOB_LOGS_PATH_TEMPLATE.format(submission_id=self._submission_id))
        try:
            make_private_directory(directory)
            return path, append_private_file(path)
        except OSError as error:
            logger.warning("job %s: what it prints is lost: %s", self._submission_id, error)
            return path, os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def _report(self, code: int, path: str) -> None:
        """Report the end of the entrypoint."""
        if self._stop_requested:
            self._table.change(self._submission_id, JobStatus.STOPPED)
        elif code == 0:
            self._table.change(self._submission_id, JobStatus.SUCCEEDED, driver_exit_code=code)
        else:
            tail = _tail(path)
            text = f"Job entrypoint command failed with exit code {code}"
            text += f", last available logs (truncated to 20,000 chars):\n{tail}" if tail else ". No logs available."
            self._fail(text, JobErrorType.JOB_ENTRYPOINT_COMMAND_ERROR, driver_exit_code=code)

    def _fail(self, text: str, kind: JobErrorType, **changes: Any) -> None:
        self._table.change(self._submission_id, JobStatus.FAILED, text, error_type=kind, **changes)

    def _variables_of_python(self) -> dict[str, str]:
        """Make the virtual environment that pip or uv fills, if there is one; return the variables that activate it."""
        wanted: dict[str, Any] = {tool: self._runtime_env[tool] for tool in ("pip", "uv") if tool in self._runtime_env}
        seconds = (self._runtime_env.get("config") or {}).get("setup_timeout_seconds", DEFAULT_SETUP_TIMEOUT)
        limit = None if seconds == -1 else float(seconds)
        return set_up_python(self._process.place.session_dir, wanted, limit).variables if wanted else {}

    def _unpacked(self) -> tuple[str, list[str], list[str]]:
        """Unpack the packages. Returns the working directory, "" for none, the modules, and their directories."""
        places = {
            digest: unpack_package(self._process.place.session_dir, digest, self._fetcher(digest))
            for digest in dict.fromkeys(digest for digests in self._packages.values() for digest in digests)
        }
        local = str(self._runtime_env.get("working_dir") or "").removeprefix("local://")
        working_dir = next((places[digest] for digest in self._packages.get("working_dir", ())), local)
        paths = [places[digest] for digest in self._packages.get("py_modules", ())]
        return working_dir, [os.path.join(path, name) for path in paths for name in sorted(os.listdir(path))], paths

    def _fetcher(self, digest: str) -> Callable[[], bytes]:
        return lambda: self._table.take_package(self._submission_id, digest)

    def _environ(self, info: JobInfo, working_dir: str, modules: list[str], paths: list[str]) -> dict[str, str]:
        """The environment of the entrypoint: that of the node, what the job's runtime_env changes, and the cluster."""
        environ, base = dict(os.environ), gpu_visibility_state()["base"]
        own = self._runtime_env.get("env_vars") or {}
        job = self._process.place.job
        for name in [*(dict(job.env) if job is not None else ()), OMP_NUM_THREADS]:
            if name not in own and name != RAY_LIBRARIES:  # of the first driver, or of this worker
                environ.pop(name, None)
                environ.update({name: base[name]} if name in base else {})
        if self._libraries:
            environ.setdefault(RAY_LIBRARIES, self._libraries)
        runtime_env = dict(self._runtime_env)
        if "working_dir" in self._packages:
            runtime_env["working_dir"] = working_dir
        if modules:
            runtime_env["py_modules"] = modules
        metadata = {JOB_ID_METADATA_KEY: self._submission_id, JOB_NAME_METADATA_KEY: self._submission_id}
        config = {"runtime_env": runtime_env, "metadata": {**metadata, **(info.metadata or {})}}
        # `import ray` in an entrypoint is hpcray: a driver of the real Ray could not join this cluster.
        path = [*([working_dir] if working_dir else []), *paths, STANDIN, environ.get("PYTHONPATH", "")]
        return {
            **environ,
            JOB_CONFIG_VARIABLE: json.dumps(config),
            "RAY_ADDRESS": self._process.place.session_dir,
            ADDRESS: self._process.place.session_dir,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTHONUNBUFFERED": "1",
        }


def _stop(submission_id: str, entrypoint: Entrypoint) -> None:
    name = os.environ.get("RAY_JOB_STOP_SIGNAL", "SIGTERM")
    if name not in _STOP_SIGNALS:
        logger.warning("%s not a valid stop signal. Terminating job with SIGTERM.", name)
        name = "SIGTERM"
    patience = float(os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", _STOP_PATIENCE))
    if not entrypoint.stop(getattr(signal, name), patience):
        print(f"job {submission_id} did not end within {patience:g} s of {name}, and was killed", file=sys.stderr)


def _note(log: IO[bytes], text: str) -> None:
    """Write a line of the supervisor's to the log of a job. A full disk is no reason to fail the job."""
    with contextlib.suppress(OSError):
        log.write(text.encode())


def _tail(path: str) -> str:
    """The last lines of a file, and of these the last characters; "" where it is gone."""
    try:
        fd = open_private_file(path)
    except OSError:
        return ""
    with os.fdopen(fd, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        # A character has four bytes at most.
        file.seek(max(0, end - 4 * _LAST_CHARACTERS))
        lines = file.read().decode(errors="replace").splitlines(keepends=True)
    return "".join(lines[-_LAST_LINES:])[-_LAST_CHARACTERS:]
