"""Submission of a script or a function as a batch job: options checked, submitit's executor set up, job recorded."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time as clock
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from hpcray.autoscaler.batch_systems import BATCH_SYSTEMS, FLUX, PBS, SLURM, BatchRequest, has_flux, has_pbs
from hpcray.common.config import parse_size
from hpcray.common.exceptions import JobError, SubmitError
from hpcray.jobs import LAUNCH, SCRIPT_OUTPUT, PickledCall, write_pickle
from hpcray.jobs.batch_launch import BATCH, TIME_IS_UP, BatchLaunch
from hpcray.jobs.batch_queues import submit_batch
from hpcray.jobs.submitted_job import JobRecord, SubmittedJob, folder_of, jobs_folder, make_folder
from hpcray.platform.allocation import run_command
from hpcray.platform.config_files import launch_config
from hpcray.platform.launcher_environment import outside_of_job
from hpcray.platform.process_control import module_line
from hpcray.platform.process_tree import ProcessIdentity
from hpcray.runtime.node.options import NodeOptions

Time = str | int | float | timedelta
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")
_TIME_HINT = "hint: minutes, 'hours:minutes:seconds', 'days-hours:minutes' as in sbatch, or a timedelta"
_LONGEST_NOTICE = 60  # seconds
_REQUEUES = 3  # of requeue=True
LOCAL = "local"
_SUBMITIT = "submitit.core._submit"
_NO_TIME_LIMIT = 60 * 24 * 3650  # minutes; submitit needs a number
_environ_lock = threading.Lock()
# Running local jobs of this process. They may outlive it; the list keeps Popen from warning of that.
_controllers: list[subprocess.Popen[bytes]] = []


def submit(
    task: str | os.PathLike[str] | Callable[..., Any],
    *args: Any,
    nodes: int = 1,
    gpus_per_node: int | None = None,
    cpus_per_node: int | None = None,
    mem: str | int | None = None,
    time: Time | None = None,
    partition: str | None = None,
    name: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    executor: str = "auto",
    env: Mapping[str, str] | None = None,
    requeue: bool | int = False,
    sbatch: Mapping[str, str | bool] | None = None,
    **kwargs: Any,
) -> SubmittedJob[Any]:
    """Submit a script, or a function, as a job of `nodes` hpcray nodes, and return at once.

    A script runs as under `hpcray-launch`; the job's result is its exit code. A function runs as the driver of the job:
    it may call `hpcray.init()` or just use tasks and actors, and what it returns is the job's result.

    Args:
        task: path of a script, "-m" (the module's name is then the first of `args`), or a function that cloudpickle
            can pickle.
        args, kwargs: of the function; for a script its arguments, as text, and no kwargs. To give a function an
            argument that is named as one of the options below, use `functools.partial`.
        nodes: hpcray nodes: machines under Slurm, nodes on this machine with the local executor.
        gpus_per_node: GPUs of each node.
        cpus_per_node: CPUs of each node; default: Slurm's default, this machine's share.
        mem: memory of each node, bytes or text such as "16g" (Slurm only; without effect with the local executor).
        time: limit: minutes, one of sbatch's forms ("1:30:00", "2-12"), or a timedelta; default: Slurm's, none locally.
        partition: Slurm's partition, or the queue of PBS or Flux; default: that of the setting `partition`, else the
            site's. Settings name an account and a constraint in the same way, where `sbatch` has none.
        name: of the job; default: the script's or the function's.
        folder: where jobs are kept, each in a directory of its own (0700); under Slurm a shared file system. Default:
            the setting `jobs`, or `.hpcray-jobs` in the working directory.
        executor: "slurm", "pbs", "flux", "local", or "auto": that of the setting `executor`, else the batch system that
            is installed and configured here.
        env: variables of the job, beside those of this process.
        requeue: True: the job may start again, up to 3 times, after its time limit or a preemption; a number is the
            limit of such starts. A function with a method `checkpoint(*args, **kwargs)` (submitit's `Checkpointable`)
            names with it the next call; anything else starts from its beginning and finds its own checkpoints.
        sbatch: further options of sbatch or `flux batch` by their long names, `{"account": "a1", "exclusive": True}`,
            or of qsub by their letters, `{"W": "group_list=a"}`; "account" and "constraint" everywhere.

    Returns:
        The job: `result()`, `state`, `stdout()`, `stderr()`, `cancel()`, `wait()`, `done()`.

    Raises:
        SubmitError: an option is wrong, submitit or sbatch is missing, or sbatch refused the job. Nothing was started.
        TypeError: the function or its arguments do not pickle.
    """
    launch, request, kind = _plan(
        task, args, kwargs, nodes=nodes, gpus_per_node=gpus_per_node, cpus_per_node=cpus_per_node, mem=mem, time=time,
        partition=partition, name=name, executor=executor, env=env, requeue=requeue, sbatch=sbatch,
    )  # fmt: skip
    return _start(launch, request, kind, make_folder(jobs_folder(folder), request.name))


def _plan(
    task: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, nodes: int, gpus_per_node: int | None,
    cpus_per_node: int | None, mem: str | int | None, time: Time | None, partition: str | None, name: str | None,
    executor: str, env: Mapping[str, str] | None, requeue: bool | int, sbatch: Mapping[str, str | bool] | None,
) -> tuple[BatchLaunch, JobRequest, str]:  # fmt: skip
    """Return what the batch process runs, the request to the batch system, and the kind of executor; as `submit`."""
    script, call = _script_or_call(task, args, kwargs)
    name = name or (call.name if call is not None else script[1] if script[0] == "-m" else Path(script[0]).stem)
    request = check_request(name, nodes, gpus_per_node, cpus_per_node, mem, time, partition, requeue, env, sbatch)
    kind = choose_executor(executor)
    wrong = "partition" if request.partition else "sbatch" if request.sbatch else ""
    if kind == LOCAL and wrong:
        raise SubmitError(
            f"{wrong} needs a batch system, and this job would run on this machine; hint: leave it out, or "
            "executor='slurm'"
        )
    request = request if kind == LOCAL else with_configured_place(request)
    if kind in (SLURM, LOCAL):
        import_submitit()
    elif request.requeues:
        raise SubmitError(f"requeue needs Slurm, and this job would run in {kind}; hint: leave it out")
    gpus = request.gpus_per_node if kind == LOCAL else None
    launch = BatchLaunch(
        nodes=request.nodes,
        node=NodeOptions(num_cpus=request.cpus_per_node, num_gpus=gpus, driver=script),
        call=call,
        slurm=kind == SLURM,
        requeues=request.requeues,
        time=request.time if kind != SLURM else None,
        env=request.env,
    )
    return launch, request, kind


@dataclass(frozen=True)
class JobPreview:
    """A preview of `submit`.

    Attributes:
        executor: "slurm", "pbs", "flux" or "local".
        script: for the batch system; "" for the local executor.
        submit: the command that would take the script; () for the local executor.
        command: the line that would start the nodes: of the batch script, or on this machine.
    """

    executor: str
    script: str
    submit: tuple[str, ...]
    command: tuple[str, ...]


def preview(
    task: str | os.PathLike[str], *args: Any, folder: str | os.PathLike[str] | None = None, **options: Any
) -> JobPreview:
    """Return what `submit` would do with the same arguments; nothing is submitted or written.

    Raises:
        SubmitError: as `submit`, but for what only the batch system can say.
    """
    launch, request, kind = _plan(task, args, {}, **options)
    own = folder_of(jobs_folder(folder), request.name)
    command = (*(("env", *words_of(request.env)) if request.env else ()), *launch.line(own))
    if kind == LOCAL:
        return JobPreview(kind, "", (), command)
    if kind == SLURM:
        executor = _slurm(import_submitit(), request, own)
        script = executor._make_submission_file_text(executor._submitit_command_str, own.name)
        return JobPreview(kind, script, ("sbatch",), command)
    try:
        line = BATCH_SYSTEMS[kind].submit_line(batch_request(request, str(own / SCRIPT_OUTPUT)))
    except ValueError as error:
        raise SubmitError(str(error)) from None
    return JobPreview(kind, _batch_script(own), tuple(line), command)


def words_of(variables: Mapping[str, str]) -> list[str]:
    """Return variables as words of `env`."""
    return [f"{name}={value}" for name, value in variables.items()]


def _start(launch: BatchLaunch, request: JobRequest, kind: str, own: Path) -> SubmittedJob[Any]:
    try:
        if kind in (SLURM, LOCAL):
            job_id = _submit_to_executor(launch, request, own)
        else:
            write_pickle(own / LAUNCH, launch)
            job_id = submit_batch(kind, batch_request(request, str(own / SCRIPT_OUTPUT)), _batch_script(own))
    except BaseException:
        shutil.rmtree(own, ignore_errors=True)
        raise
    controller = ProcessIdentity.of(int(job_id)) if kind == LOCAL else None
    record = JobRecord(
        job_id=job_id,
        name=request.name,
        executor=kind,
        nodes=request.nodes,
        submitted=clock.time(),
        time_limit=request.time,
        started=controller.started if controller is not None else 0,
        command=tuple(launch.node.driver) if launch.call is None else (launch.call.name,),
        requeues=request.requeues,
    )
    job: SubmittedJob[Any] = SubmittedJob(own, record)
    try:
        record.write(own)
    except OSError as error:  # nobody would find it, and it would run beside the one that is submitted next
        with contextlib.suppress(OSError, JobError, SubmitError):
            job.cancel()
        raise SubmitError(f"job {job_id} is cancelled, as {own} does not take its record: {error.strerror}") from None
    return job


def _script_or_call(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[str], PickledCall | None]:
    """(the command line of a script, None) or ([], a call)."""
    if not isinstance(task, str | os.PathLike):
        if not callable(task):
            raise SubmitError(f"{task!r} is neither a script nor a function")
        return [], PickledCall.of(task, args, kwargs)
    if kwargs:
        raise SubmitError(f"a script takes no keyword arguments, and submit() no option {sorted(kwargs)}")
    words = [os.fspath(word) if isinstance(word, os.PathLike) else str(word) for word in args]
    if task == "-m":
        if not words:
            raise SubmitError('submit("-m") needs the name of a module')
        return ["-m", *words], None
    path = Path(task).expanduser().absolute()
    if not path.is_file():
        raise SubmitError(f"no script {path}; hint: submit(function) runs a function, submit('-m', name) a module")
    return [str(path), *words], None


@dataclass(frozen=True)
class JobRequest:
    """Options of one job; sizes in bytes, times in seconds, each None where the site's default applies.

    Attributes:
        name: shown by `hpcray jobs` and squeue.
        nodes: number of hpcray nodes.
        gpus_per_node, cpus_per_node, mem: of each node.
        time: limit of the whole job.
        partition: Slurm's partition, or "".
        requeues: how often the job may start again after its time limit.
        env: variables of the job.
        sbatch: further options of sbatch, by their long names.
    """

    name: str
    nodes: int = 1
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    mem: int | None = None
    time: int | None = None
    partition: str = ""
    requeues: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    sbatch: Mapping[str, str | bool] = field(default_factory=dict)

    @property
    def notice(self) -> int:
        """Seconds between the signal that announces the end and the time limit."""
        return 0 if self.time is None else min(_LONGEST_NOTICE, max(1, self.time // 3))


def check_request(
    name: str,
    nodes: int,
    gpus_per_node: int | None,
    cpus_per_node: int | None,
    mem: str | int | None,
    time: Time | None,
    partition: str | None,
    requeue: bool | int,
    env: Mapping[str, str] | None,
    sbatch: Mapping[str, str | bool] | None,
) -> JobRequest:
    """Check the options and make a request of them.

    Raises:
        SubmitError: an option is not valid; the message names it.
    """
    for label, value in (env or {}).items():
        if not isinstance(label, str) or not isinstance(value, str) or "=" in label or not label:
            raise SubmitError(f"env: {label!r}: {value!r} is no variable; hint: names and values are strings")
    try:
        size = None if mem is None else parse_size(str(mem))
    except ValueError as error:
        raise SubmitError(f"mem: {error}") from None
    return JobRequest(
        name=name,
        nodes=_count("nodes", nodes, 1),
        gpus_per_node=None if gpus_per_node is None else _count("gpus_per_node", gpus_per_node, 0),
        cpus_per_node=None if cpus_per_node is None else _count("cpus_per_node", cpus_per_node, 1),
        mem=size,
        time=None if time is None else parse_time(time),
        partition=partition or "",
        requeues=_REQUEUES if requeue is True else _count("requeue", int(requeue), 0),
        env=dict(env or {}),
        sbatch={option.lstrip("-").replace("_", "-"): value for option, value in (sbatch or {}).items()},
    )


def with_configured_place(request: JobRequest) -> JobRequest:
    """The request with the partition, account and constraint of the configuration, where it has none of its own.

    Raises:
        SubmitError: a setting is not valid.
    """
    environ, own = outside_of_job(os.environ), request.partition or str(request.sbatch.get("partition", ""))
    try:
        partition = own or launch_config(environ).partition
        configured = launch_config(environ, partition)  # with the settings of that partition
    except ValueError as error:
        raise SubmitError(str(error)) from None
    wanted = {"account": configured.account, "constraint": configured.constraint}
    sbatch = {**{option: text for option, text in wanted.items() if text}, **request.sbatch}
    return replace(request, partition="" if "partition" in request.sbatch else partition, sbatch=sbatch)


def parse_time(given: Time) -> int:
    """Seconds of a time limit, at least 1.

    Args:
        given: minutes as a number; a `timedelta`; or one of sbatch's forms: minutes, minutes:seconds,
            hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds.

    Raises:
        SubmitError: `given` has none of these forms, or is not positive.
    """
    seconds = math.nan
    if isinstance(given, timedelta):
        seconds = given.total_seconds()
    elif isinstance(given, str):
        seconds = _sbatch_time(given.strip())
    elif isinstance(given, int | float) and not isinstance(given, bool):
        seconds = given * 60.0
    if not (0 < seconds < math.inf):
        raise SubmitError(f"time={given!r} is not a time limit; {_TIME_HINT}")
    return math.ceil(seconds)


def _sbatch_time(text: str) -> float:
    found = _TIME.fullmatch(text)
    if found is None:
        return math.nan
    parts = [int(part) for part in (found["a"], found["b"], found["c"]) if part is not None]
    if found["days"] is None and len(parts) < 3:
        parts.insert(0, 0)  # minutes, or minutes:seconds
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return int(found["days"] or 0) * 86400.0 + hours * 3600 + minutes * 60 + seconds


def _count(name: str, value: int, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SubmitError(f"{name}={value!r} is not a whole number of at least {least}")
    return value


def import_submitit() -> Any:
    """Import the module submitit.

    Raises:
        SubmitError: submitit is not installed.
    """
    try:
        import submitit
    except ImportError as error:
        raise SubmitError(f"submission needs submitit ({error}); hint: pip install 'hpcray[slurm]'") from None
    return submitit


def choose_executor(requested: str) -> str:
    """The executor to use: "slurm", "pbs", "flux" or "local".

    Args:
        requested: one of these, or "auto": that of the setting `executor`, else Flux inside of a Flux
            instance, else Slurm, PBS or Flux where they are installed and configured, else local.

    Raises:
        SubmitError: no such executor, a batch system without its commands, or a setting is not valid.
    """
    if requested == "auto":
        try:
            requested = launch_config(os.environ).executor
        except ValueError as error:
            raise SubmitError(str(error)) from None
    if requested not in (*BATCH_SYSTEMS, LOCAL, "auto"):
        raise SubmitError(f"executor={requested!r} is none; hint: 'auto', 'slurm', 'pbs', 'flux' or 'local'")
    if requested in BATCH_SYSTEMS and shutil.which(command := BATCH_SYSTEMS[requested].submit_command) is None:
        raise SubmitError(f"no {command} on PATH; hint: submit from a login node, or executor='local'")
    if requested != "auto":
        return requested
    if os.environ.get("FLUX_URI") and has_flux(os.environ):
        return FLUX  # an instance inside a job of Slurm, too
    if shutil.which("sbatch") is None:
        return PBS if has_pbs(os.environ) else FLUX if has_flux(os.environ) else LOCAL
    return SLURM if shutil.which("sbatch") is not None and _slurm_is_configured() else LOCAL


def _slurm_is_configured() -> bool:
    """True if a cluster belongs to the installed Slurm commands. True also for a controller that is down."""
    try:
        found = run_command(["scontrol", "ping"], 30)
    except (OSError, subprocess.TimeoutExpired):
        return True
    return "configuration source" not in found.stderr  # scontrol's message without slurm.conf


def batch_request(request: JobRequest, output: str) -> BatchRequest:
    """The request as PBS and Flux take it.

    Args:
        output: path of the file for what the batch script prints.
    """
    options = dict(request.sbatch)
    account, constraint = (str(options.pop(name, "")) for name in ("account", "constraint"))
    return BatchRequest(
        name=request.name,
        nodes=request.nodes,
        cpus=request.cpus_per_node,
        gpus=request.gpus_per_node,
        mem=request.mem,
        time=request.time,
        partition=request.partition,
        account=account,
        constraint=constraint,
        output=output,
        options=options,
    )


def _batch_script(folder: Path) -> str:
    command = _python_line("hpcray.jobs.batch_launch", folder, BATCH)
    return f"#!/bin/sh\ncd {shlex.quote(os.getcwd())} || exit 1\nexec {command}\n"


def _submit_to_executor(launch: BatchLaunch, request: JobRequest, folder: Path) -> str:
    submitit = import_submitit()
    executor = _slurm(submitit, request, folder) if launch.slurm else _local(submitit, request, folder)
    with without_outer_job():
        try:
            return str(executor.submit(launch).job_id)
        except submitit.core.utils.FailedJobError as error:
            raise SubmitError(f"sbatch refused the job: {str(error).strip()}") from None
        except (RuntimeError, OSError) as error:
            raise SubmitError(f"the job could not be submitted: {error}") from error


def _slurm(submitit: Any, request: JobRequest, folder: Path) -> Any:
    class SiteExecutor(submitit.SlurmExecutor):  # type: ignore[misc]
        """submitit's executor always sets a time limit; this one leaves the site's default in force."""

        @property
        def _submitit_command_str(self) -> str:
            # The batch script's own shell becomes the process, see below.
            return "exec " + _python_line(_SUBMITIT, folder)

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            text = str(super()._make_submission_file_text(command, uid))
            return text.replace(f"#SBATCH --time={_NO_TIME_LIMIT}\n", "")

    # Not under srun: the batch script's own shell becomes submitit's process (exec), so that it gets the signal that
    # announces the end ("B:"), while the job's step belongs to hpcray-launch alone.
    executor = SiteExecutor(folder, max_num_timeout=request.requeues)
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
        time=_NO_TIME_LIMIT if request.time is None else math.ceil(request.time / 60),
        wckey=None,
        additional_parameters={**extra, **request.sbatch},
    )
    return executor


def _local(submitit: Any, request: JobRequest, folder: Path) -> Any:
    class DetachedExecutor(submitit.LocalExecutor):  # type: ignore[misc]
        """Runs the job apart from this process's terminal, pipes and Ctrl-C, unlike submitit's executor."""

        @property
        def _submitit_command_str(self) -> str:
            return _python_line(_SUBMITIT, folder)

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
                module_line("submitit.local._local", str(self.folder)),
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            _controllers[:] = [*(known for known in _controllers if known.poll() is None), process]
            return submitit.LocalJob(self.folder, str(process.pid), tasks=[0], process=process)

    executor = DetachedExecutor(folder, max_num_timeout=request.requeues)
    minutes = _NO_TIME_LIMIT if request.time is None else request.time / 60
    executor.update_parameters(timeout_min=minutes, signal_delay_s=request.notice, tasks_per_node=1)
    return executor


def _python_line(module: str, folder: Path, *words: str) -> str:
    """The shell's words that run a module with a folder and further words. They find this hpcray also where none is
    installed, search no working directory, and keep submitit silent."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(dict.fromkeys([root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))
    found = [] if root.startswith(sys.prefix + os.sep) else [f"PYTHONPATH={path}"]
    return shlex.join(["env", "SUBMITIT_LOG_LEVEL=CRITICAL", *found, *module_line(module, str(folder), *words)])


@contextlib.contextmanager
def without_outer_job() -> Iterator[None]:
    """Hide the variables of a surrounding job."""
    with _environ_lock:
        before = dict(os.environ)
        for name in before.keys() - outside_of_job(before):
            del os.environ[name]
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.setdefault(name, value)


# ------------------------------------------------------------ client mode
# Client mode, `hpcray submit --driver here`: the program runs on this machine, which gives the job no CPUs; its nodes
# come from batch jobs.


_TYPE = "worker"


def client_mode_command(words: Sequence[str], request: JobRequest, kind: str) -> tuple[list[str], dict[str, str]]:
    """The command line of a program with nodes elsewhere, and its environment.

    Args:
        words: the program, as `python` takes it.
        request: the nodes; their batch jobs are cancelled when the program has ended.
        kind: the executor, "slurm" or "local".
    """
    given = {"CPU": request.cpus_per_node, "GPU": request.gpus_per_node}
    options: dict[str, str | int | bool | None] = {
        "partition": request.partition or None,
        "time": None if request.time is None else math.ceil(request.time / 60),
        "mem": None if request.mem is None else f"{math.ceil(request.mem / (1 << 20))}M",
        **request.sbatch,
    }
    node_type = {
        "resources": {name: amount for name, amount in given.items() if amount},
        "node_config": {name: value for name, value in options.items() if value is not None},
    }
    count = str(request.nodes + 1)
    line = module_line("hpcray", "--num-cpus", "0", "--num-gpus", "0", "--min-nodes", count)
    line += ["--max-nodes", count, "--node-types", json.dumps({_TYPE: node_type}), *words]
    return line, {**os.environ, **request.env, "HPCRAY_NODE_PROVIDER": kind}
