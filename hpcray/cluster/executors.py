"""submitit's executors, set up for hpcray jobs. The only module that imports submitit."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcray.base.job_errors import SubmitError
from hpcray.cluster.batch import TIME_IS_UP, Launch
from hpcray.cluster.job_options import JobRequest
from hpcray.host.launcher import strip_launcher

SLURM, LOCAL = "slurm", "local"
_FOR_EVER = 60 * 24 * 3650
_NOT_CONFIGURED = "configuration source"
_OF_THE_OUTER_JOB = ("SLURM_", "SRUN_", "SLURMD_", "SUBMITIT_", "HPCRAY_ADDRESS", "HPCRAY_CONSOLE")
_OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS")
_switching = threading.Lock()
_controllers: list[subprocess.Popen[bytes]] = []
"""Local jobs that this process has started and that run: they may outlive it, and nobody shall warn of that."""


def import_submitit() -> Any:
    """The module submitit.

    Raises:
        SubmitError: it is not installed.
    """
    try:
        import submitit
    except ImportError as error:
        raise SubmitError(f"submission needs submitit ({error}); hint: pip install 'hpcray[slurm]'") from None
    return submitit


def choose(wanted: str) -> str:
    """Which executor to use: "slurm" or "local".

    Args:
        wanted: one of these, or "auto": Slurm where sbatch is installed and configured, else local.

    Raises:
        SubmitError: no such executor, or Slurm is wanted and sbatch is not there.
    """
    if wanted not in (SLURM, LOCAL, "auto"):
        raise SubmitError(f"executor={wanted!r} is none; hint: 'auto', 'slurm' or 'local'")
    if wanted == LOCAL:
        return LOCAL
    if shutil.which("sbatch") is None:
        if wanted == SLURM:
            raise SubmitError("no sbatch on PATH; hint: submit from a login node, or executor='local'")
        return LOCAL
    if wanted == "auto" and not _slurm_is_configured():
        return LOCAL
    return SLURM


def _slurm_is_configured() -> bool:
    """Slurm's commands may be installed where there is no cluster. A controller that is down is another matter."""
    try:
        found = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return True
    return _NOT_CONFIGURED not in found.stderr


def start(launch: Launch, request: JobRequest, folder: Path) -> str:
    """Submit; the job's id.

    Raises:
        SubmitError: it was refused; the message holds what sbatch said.
    """
    submitit = import_submitit()
    executor = _slurm(submitit, request, folder) if launch.slurm else _local(submitit, request, folder)
    with _outer_job_set_aside():
        try:
            return str(executor.submit(launch).job_id)
        except submitit.core.utils.FailedJobError as error:
            raise SubmitError(f"sbatch refused the job: {str(error).strip()}") from None
        except (RuntimeError, OSError) as error:
            raise SubmitError(f"the job could not be submitted: {error}") from error


def _slurm(submitit: Any, request: JobRequest, folder: Path) -> Any:
    # Not under srun: the batch script's own shell becomes submitit's process (exec), so that it gets the signal that
    # announces the end ("B:"), while the job's step belongs to hpcray-launch alone.
    executor = _slurm_class(submitit)(folder, max_num_timeout=request.requeues, python=f"exec {_python()}")
    options: dict[str, Any] = {
        "job_name": request.name,
        "nodes": request.nodes,
        "ntasks_per_node": 1,
        "partition": request.partition or None,
        "cpus_per_task": request.cpus_per_node,
        "gpus_per_node": request.gpus_per_node,
        "mem": None if request.mem is None else f"{math.ceil(request.mem / (1 << 20))}M",
        "use_srun": False,
    }
    extra: dict[str, Any] = {"requeue" if request.requeues else "no-requeue": True, "no-kill": True}
    extra["signal"] = f"B:{TIME_IS_UP.name.removeprefix('SIG')}@{request.notice or 60}"
    executor.update_parameters(
        **{name: value for name, value in options.items() if value is not None},
        time=_FOR_EVER if request.time is None else math.ceil(request.time / 60),
        wckey=None,
        additional_parameters={**extra, **request.sbatch},
    )
    return executor


def _slurm_class(submitit: Any) -> Any:
    class SiteExecutor(submitit.SlurmExecutor):  # type: ignore[misc]
        """submitit's own always sets a time limit; without one the site's default holds."""

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            text = str(super()._make_submission_file_text(command, uid))
            return text.replace(f"#SBATCH --time={_FOR_EVER}\n", "")

    return SiteExecutor


def _local(submitit: Any, request: JobRequest, folder: Path) -> Any:
    executor = _local_class(submitit)(folder, max_num_timeout=request.requeues, python=_python())
    executor.update_parameters(
        timeout_min=_FOR_EVER if request.time is None else request.time / 60,
        signal_delay_s=request.notice,
        tasks_per_node=1,
    )
    return executor


def _local_class(submitit: Any) -> Any:
    class DetachedExecutor(submitit.LocalExecutor):  # type: ignore[misc]
        """submitit's own lets the job share our terminal, our pipes and our Ctrl-C."""

        def _submit_command(self, command: str) -> Any:
            environ = {
                **os.environ,
                "SUBMITIT_LOCAL_NTASKS": "1",
                "SUBMITIT_LOCAL_COMMAND": command,
                "SUBMITIT_LOCAL_TIMEOUT_S": str(int(60 * self.parameters["timeout_min"])),
                "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(self.parameters["signal_delay_s"]),
                "SUBMITIT_LOCAL_NODEID": "0",
                "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
                "SUBMITIT_STDERR_TO_STDOUT": "",
                "SUBMITIT_EXECUTOR": "local",
                "SUBMITIT_LOCAL_WITH_SHELL": "",
            }
            process = subprocess.Popen(
                [sys.executable, "-m", "submitit.local._local", str(self.folder)],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            _controllers[:] = [*(known for known in _controllers if known.poll() is None), process]
            return submitit.LocalJob(self.folder, str(process.pid), tasks=[0], process=process)

    return DetachedExecutor


def _python() -> str:
    """The interpreter's line. The job must find this hpcray, also where it is not installed; submitit says nothing."""
    import hpcray

    root = str(Path(hpcray.__file__).resolve().parents[1])
    path = os.pathsep.join(dict.fromkeys([root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))
    found = [] if root.startswith(sys.prefix + os.sep) else [f"PYTHONPATH={path}"]
    return shlex.join(["env", "SUBMITIT_LOG_LEVEL=CRITICAL", *found, sys.executable])


@contextlib.contextmanager
def _outer_job_set_aside() -> Iterator[None]:
    """sbatch takes options from SLURM_* variables, and hpcray its session from its own: a job that is submitted from
    inside another one must not inherit either."""
    with _switching:
        before = dict(os.environ)
        strip_launcher(os.environ)
        for name in list(os.environ):
            if name.startswith(_OF_THE_OUTER_JOB) and name not in _OF_THE_CLUSTER:
                del os.environ[name]
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.setdefault(name, value)
