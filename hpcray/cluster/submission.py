"""`hpcray.cluster.submit`: a script or a function as a batch job of several nodes."""

from __future__ import annotations

import os
import re
import time as clock
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpcray.base.job_errors import SubmitError
from hpcray.cluster import executors
from hpcray.cluster.batch import Launch
from hpcray.cluster.job_options import JobRequest, Time, check_request
from hpcray.cluster.jobs import Job, Record, default_folder, make_folder
from hpcray.cluster.outcome import Call
from hpcray.host.processes import Family


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
) -> Job[Any]:
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
        partition: Slurm's partition.
        name: of the job; default: the script's or the function's.
        folder: where jobs are kept, each in a directory of its own (0700); under Slurm a shared file system. Default:
            $HPCRAY_JOBS, or `.hpcray-jobs` in the working directory.
        executor: "slurm", "local", or "auto": Slurm where sbatch is installed and configured.
        env: variables of the job, beside those of this process.
        requeue: whether the job may start again when its time is up or it was preempted; a number says how often (True:
            3 times). A function with a method `checkpoint(*args, **kwargs)` (submitit's `Checkpointable`) says with it
            what to call then; anything else starts from its beginning and finds its own checkpoints.
        sbatch: further options of sbatch by their long names, `{"account": "a1", "exclusive": True}`.

    Returns:
        The job: `result()`, `state`, `stdout()`, `stderr()`, `cancel()`, `wait()`, `done()`.

    Raises:
        SubmitError: an option is wrong, submitit or sbatch is missing, or sbatch refused the job. Nothing was started.
        TypeError: the function or its arguments do not pickle.
    """
    script, call = _what(task, args, kwargs)
    request = check_request(
        name or _name(script, call), nodes, gpus_per_node, cpus_per_node, mem, time, partition, requeue, env, sbatch
    )
    chosen = executors.choose(executor)
    if chosen == executors.LOCAL:
        _check_local(request)
    executors.import_submitit()
    base = Path(folder) if folder is not None else default_folder()
    launch = Launch(
        nodes=request.nodes,
        cpus_per_node=request.cpus_per_node,
        gpus_per_node=None if chosen == executors.SLURM else request.gpus_per_node,
        script=script,
        call=call,
        slurm=chosen == executors.SLURM,
        requeues=request.requeues,
        time=request.time if chosen == executors.LOCAL else None,
        env=request.env,
    )
    return _start(launch, request, chosen, make_folder(base.expanduser().absolute(), request.name))


def _start(launch: Launch, request: JobRequest, chosen: str, own: Path) -> Job[Any]:
    job_id = None
    try:
        job_id = executors.start(launch, request, own)
    finally:
        if job_id is None:
            _remove(own)
    controller = Family.of(int(job_id)) if chosen == executors.LOCAL else None
    record = Record(
        job_id=job_id,
        name=request.name,
        executor=chosen,
        nodes=request.nodes,
        submitted=clock.time(),
        time_limit=request.time,
        started=controller.started if controller is not None else 0,
        command=launch.script if launch.call is None else (launch.call.name,),
        requeues=request.requeues,
    )
    record.write(own)
    return Job(own, record)


def _what(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[str, ...], Call | None]:
    """(the words of a script, None) or ((), a call)."""
    if not isinstance(task, str | os.PathLike):
        if not callable(task):
            raise SubmitError(f"{task!r} is neither a script nor a function")
        return (), Call.of(task, args, kwargs)
    if kwargs:
        raise SubmitError(f"a script takes no keyword arguments, and submit() no option {sorted(kwargs)}")
    words = tuple(os.fspath(word) if isinstance(word, os.PathLike) else str(word) for word in args)
    if task == "-m":
        if not words:
            raise SubmitError('submit("-m") needs the name of a module')
        return ("-m", *words), None
    path = Path(task).expanduser().absolute()
    if not path.is_file():
        raise SubmitError(f"no script {path}; hint: submit(function) runs a function, submit('-m', name) a module")
    return (str(path), *words), None


def _name(script: tuple[str, ...], call: Call | None) -> str:
    if call is not None:
        return call.name
    return script[1] if script[0] == "-m" else Path(script[0]).stem


def _check_local(request: JobRequest) -> None:
    """What the local executor cannot do is refused, lest a job run on less than it was meant to."""
    wrong = "partition" if request.partition else "sbatch" if request.sbatch else ""
    if wrong:
        raise SubmitError(
            f"{wrong} needs Slurm, and this job would run on this machine; hint: leave it out, or executor='slurm'"
        )


def _remove(folder: Path) -> None:
    """A folder of a job that was not started."""
    import shutil

    if re.search(r"-[0-9a-f]{6}$", folder.name):
        shutil.rmtree(folder, ignore_errors=True)
