"""The client of Ray's job API. Each call joins the cluster over its Unix sockets, or uses the program's own session."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import copy
import enum
import json
import logging
import os
import random
import string
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from hpcray.api.actor import get_actor, kill, make_actor_class
from hpcray.api.objects import get
from hpcray.api.options import ActorOptions
from hpcray.api.scheduling_strategies import NodeAffinitySchedulingStrategy
from hpcray.common.config import RAY_LIBRARIES
from hpcray.common.exceptions import RayError
from hpcray.common.job_names import (
    JOB_ACTOR_NAME_TEMPLATE,
    JOB_LOGS_PATH_TEMPLATE,
    SUPERVISOR_ACTOR_RAY_NAMESPACE,
)
from hpcray.common.labels import selector_problem
from hpcray.job_submission.cluster_address import get_address_for_submission_client
from hpcray.job_submission.job_supervisor import JobSupervisor
from hpcray.runtime.core_worker.core_worker import CoreWorker, current
from hpcray.runtime_env.runtime_env import IN_PLACE, RuntimeEnv, unsupported_field_error, validated_runtime_env
from hpcray.runtime_env.runtime_env_setup import package_digest
from hpcray.runtime_env.submitted_runtime_env import package_of, package_uri, path_of_module
from hpcray.state import attached, connected
from hpcray.state.aggregator import StateAggregator
from hpcray.state.job_table import JobInfo, JobStatus, JobTable
from hpcray.state.logs import LogError, LogReader
from hpcray.state.schemas import JobState

# ------------------------------------------------------------ job records
# The records of a submitted job: the request that submits it, and the details that `JobSubmissionClient` returns.

_NUMBER = (int, float)
# Field: its types, their name in errors, the types of values.
_TYPES: dict[str, tuple[Any, str, Any]] = {
    "entrypoint": (str, "a string", None),
    "submission_id": (str, "a string if provided", None),
    "runtime_env": (dict, "a dict", None),
    "metadata": (dict, "a dict", (str, "strings")),
    "entrypoint_num_cpus": (_NUMBER, "a number", None),
    "entrypoint_num_gpus": (_NUMBER, "a number", None),
    "entrypoint_memory": (int, "an integer", None),
    "entrypoint_resources": (dict, "a dict", (_NUMBER, "numbers")),
    "entrypoint_label_selector": (dict, "a dict", (str, "strings")),
}


@dataclass
class JobSubmitRequest:
    """A job to submit.

    Raises:
        TypeError: a field is of the wrong type.
    """

    entrypoint: str
    submission_id: str | None = None
    runtime_env: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    entrypoint_num_cpus: int | float | None = None
    entrypoint_num_gpus: int | float | None = None
    entrypoint_memory: int | None = None
    entrypoint_resources: dict[str, float] | None = None
    entrypoint_label_selector: dict[str, str] | None = None

    def __post_init__(self) -> None:
        for field, (kind, name, values) in _TYPES.items():
            value = getattr(self, field)
            if field != "entrypoint" and value is None:
                continue
            if not isinstance(value, kind):
                raise TypeError(f"{field} must be {name}, got {type(value)}")
            if isinstance(value, Mapping):
                _check_items(field, value, values)

    @property
    def has_place(self) -> bool:
        """True if the job says where, or with which resources, its entrypoint runs; else that is on the head."""
        return any((
            self.entrypoint_num_cpus, self.entrypoint_num_gpus, self.entrypoint_memory, self.entrypoint_resources,
            self.entrypoint_label_selector,
        ))  # fmt: skip

    def problem(self) -> str:
        """Return why the cluster refuses the job; "" if it does not."""
        selector = self.entrypoint_label_selector
        return (selector_problem(selector) or "") if selector else ""


def _check_items(field: str, value: Mapping[Any, Any], values: tuple[Any, str] | None) -> None:
    for key, item in value.items():
        if not isinstance(key, str):
            raise TypeError(f"{field} keys must be strings, got {type(key)}")
        if values is not None and not isinstance(item, values[0]):
            raise TypeError(f"{field} values must be {values[1]}, got {type(item)}")


# ------------------------------------------------------------ job details
# The records that `JobSubmissionClient` returns about a job.


_Fields = dict[str, Any]


class JobType(str, enum.Enum):
    """The way a job was started: submitted, or by a program that called `init()`."""

    SUBMISSION = "SUBMISSION"
    DRIVER = "DRIVER"


class _Model:
    """The methods of pydantic's models that programs call on the records below."""

    def dict(self) -> _Fields:
        """Return the fields, those of records in them too."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    model_dump = dict

    def json(self) -> str:
        """Return the fields as JSON."""
        return json.dumps(self.dict())

    model_dump_json = json


@dataclass
class DriverInfo(_Model):
    """A driver: the id of its job, its address, and its pid as a text."""

    id: str
    node_ip_address: str
    pid: str


@dataclass(kw_only=True)
class JobDetails(_Model):
    """A job and its driver.

    Attributes:
        job_id: id of the driver's job; None before there is a driver.
        submission_id: of a submitted job.
        driver_info: of a submitted job the driver that it has started last.
        start_time, end_time: Unix times in ms.
        driver_agent_http_address: always None, as there are no agents.
        driver_node_id: the node on which the entrypoint runs or ran.
        driver_exit_code: of the entrypoint.
    """

    type: JobType
    job_id: str | None = None
    submission_id: str | None = None
    driver_info: DriverInfo | None = None
    status: JobStatus
    entrypoint: str
    message: str | None = None
    error_type: str | None = None
    start_time: int | None = None
    end_time: int | None = None
    metadata: dict[str, str] | None = None
    runtime_env: dict[str, Any] | None = None
    driver_agent_http_address: str | None = None
    driver_node_id: str | None = None
    driver_exit_code: int | None = None

    def __post_init__(self) -> None:
        self.type, self.status = JobType(self.type), JobStatus(self.status)
        driver: Any = self.driver_info
        if isinstance(driver, dict):
            self.driver_info = DriverInfo(**driver)


# ------------------------------------------------------------ job submission client

logger = logging.getLogger(__name__)

_VERSION = "4"
"""The version of Ray's job API."""
_LONGEST_ID = 200  # bytes
_TIMEOUT = 30.0  # seconds that a process may take to answer
_STOP_TIMEOUT = 10.0  # seconds
_TAIL_INTERVAL = 0.25  # seconds between looks at a log
_ALLOW_ANY_NODE = "RAY_JOB_ALLOW_DRIVER_ON_WORKER_NODES"
_ID_CHARACTERS = sorted({*string.ascii_letters, *string.digits} - {*"IloO0"})
_ID_LENGTH = 16
_ARGUMENTS = {"address": (str, "a string"), "create_cluster_if_needed": (bool, "a bool"), "cookies": (dict, "a dict"),
              "metadata": (dict, "a dict"), "headers": (dict, "a dict")}  # fmt: skip
_one_at_a_time = threading.RLock()


class JobSubmissionClient:
    """Submits jobs into a running cluster of this user, and asks for their state.

    Args:
        address: None or "auto": the cluster of this program, else the only one of this user on this machine; a session
            directory; or a URL as of Ray's dashboard ("http://127.0.0.1:8265"), which means the same as "auto".
            RAY_API_SERVER_ADDRESS and RAY_ADDRESS replace it.
        metadata: of all jobs that this client submits.
        create_cluster_if_needed, cookies, headers, verify: without effect: there is no HTTP server.

    Raises:
        ConnectionError: there is no such cluster. TypeError: an argument is of the wrong type.
    """

    def __init__(
        self,
        address: str | None = None,
        create_cluster_if_needed: bool = False,
        cookies: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        headers: dict[str, Any] | None = None,
        verify: str | bool | None = True,
        **kwargs: Any,
    ) -> None:
        given = {"address": address, "create_cluster_if_needed": create_cluster_if_needed, "cookies": cookies,
                 "metadata": metadata, "headers": headers}  # fmt: skip
        for name, value in given.items():
            kind, shown = _ARGUMENTS[name]
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} must be {shown}, got {type(value)}")
        if not isinstance(verify, (str, bool)):
            raise TypeError(f"verify must be a str or bool, got {type(verify)}")
        with _one_at_a_time:  # meanwhile no other thread's call has joined a cluster for itself
            self._own = current.process
            self._session_dir = get_address_for_submission_client(address)
        self._default_metadata = metadata or {}

    def get_address(self) -> str:
        """Return the session directory of the cluster."""
        return self._session_dir

    def get_version(self) -> str:
        """Return the version of Ray's job API that this client follows."""
        return _VERSION

    def submit_job(
        self,
        *,
        entrypoint: str,
        job_id: str | None = None,
        runtime_env: dict[str, Any] | None = None,
        metadata: dict[str, str] | None = None,
        submission_id: str | None = None,
        entrypoint_num_cpus: int | float | None = None,
        entrypoint_num_gpus: int | float | None = None,
        entrypoint_memory: int | None = None,
        entrypoint_resources: dict[str, float] | None = None,
        entrypoint_label_selector: dict[str, str] | None = None,
    ) -> str:
        """Submit a job, which starts soon after.

        Args:
            entrypoint: the shell command to run. A program in it that calls `init()` joins the cluster.
            job_id: deprecated name of `submission_id`.
            runtime_env: for the entrypoint, and default of its driver's tasks and actors.
            metadata: stored with the job.
            submission_id: id of the job; by default a new one.
            entrypoint_num_cpus, entrypoint_num_gpus, entrypoint_memory, entrypoint_resources: reserved for the
                entrypoint itself. Where none is given it runs on the head's node.
            entrypoint_label_selector: labels of the node on which it runs.

        Returns:
            The submission id.

        Raises:
            RuntimeError: the id is in use, or the cluster refuses the job.
            TypeError, ValueError: an argument is not valid. ConnectionError: the cluster has ended.
        """
        if job_id:
            logger.warning("job_id kwarg is deprecated. Please use submission_id instead.")
        env = _checked_env(copy.deepcopy(runtime_env or {}))
        request = JobSubmitRequest(
            entrypoint=entrypoint,
            submission_id=submission_id or job_id or _new_id(),
            runtime_env=dict(env),
            metadata={**(metadata or {}), **self._default_metadata} if isinstance(metadata or {}, dict) else metadata,
            entrypoint_num_cpus=entrypoint_num_cpus,
            entrypoint_num_gpus=entrypoint_num_gpus,
            entrypoint_memory=entrypoint_memory,
            entrypoint_resources=entrypoint_resources,
            entrypoint_label_selector=entrypoint_label_selector,
        )
        packages = _Packages(env)
        if problem := request.problem():
            _refuse(400, problem)
        with self._joined() as process:
            return _submit(process, request, env, packages)

    def stop_job(self, job_id: str) -> bool:
        """Ask a job to end: its processes get SIGTERM, and after some seconds SIGKILL.

        Args:
            job_id: submission id, or id of the driver's job.

        Returns:
            True if it was running.

        Raises:
            RuntimeError: there is no such job, or it was not submitted.
        """
        with self._joined() as process:
            job = _submission(process, job_id, "stop")
            if job.status.is_terminal():
                return False
            ident, table = job.submission_id or "", JobTable(process)
            name = JOB_ACTOR_NAME_TEMPLATE.format(job_id=ident)
            try:
                supervisor = get_actor(name, SUPERVISOR_ACTOR_RAY_NAMESPACE)
            except ValueError:
                return False
            if job.status is JobStatus.PENDING:
                # It may wait for resources, and this process, which would have to send it the call, will not.
                table.change(ident, JobStatus.STOPPED)
                kill(supervisor)
                return True
            with contextlib.suppress(RayError):  # it has just ended
                get(supervisor.stop.remote(), timeout=_STOP_TIMEOUT)
            return True

    def delete_job(self, job_id: str) -> bool:
        """Forget a job that has ended. Its log stays on disk as long as its node.

        Raises:
            RuntimeError: there is no such job, it was not submitted, or it has not ended.
        """
        with self._joined() as process:
            job = _submission(process, job_id, "delete")
            if not job.status.is_terminal():
                text = f"Attempted to delete job '{job.submission_id}', but it is in a non-terminal state {job.status}."
                _refuse(500, text)
            JobTable(process).delete(job.submission_id or "")
        return True

    def get_job_info(self, job_id: str) -> JobDetails:
        """Return a job.

        Args:
            job_id: submission id, or id of the driver's job.

        Raises:
            RuntimeError: there is no such job.
        """
        with self._joined() as process:
            return _details(process, job_id)

    def list_jobs(self) -> list[JobDetails]:
        """Return all submitted jobs, and the drivers that run and belong to none."""
        with self._joined() as process:
            return [_details_of(row) for row in StateAggregator(process, _TIMEOUT).jobs()]

    def get_job_status(self, job_id: str) -> JobStatus:
        """Return the status of a job.

        Raises:
            RuntimeError: there is no such job.
        """
        return self.get_job_info(job_id).status

    def get_job_logs(self, job_id: str) -> str:
        """Return all that a job has printed.

        Raises:
            RuntimeError: there is no such job, it was not submitted, or its node is gone.
        """
        pieces = []
        with self._joined() as process:
            job, start = _submission(process, job_id, "get logs of"), 0
            while data := _read_log(process, job, start):
                pieces.append(data)
                start += len(data)
        return b"".join(pieces).decode(errors="replace")

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        """Yield what a job prints, from its beginning until it has ended.

        Raises:
            RuntimeError: there is no such job, it was not submitted, or its node is gone.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        start, ended = 0, False
        with connected(self._session_dir) as process:
            while True:
                data, over = await asyncio.to_thread(_more, process, job_id, start)
                start += len(data)
                if text := decoder.decode(data):
                    yield text
                if data:
                    continue
                if ended:
                    return
                ended = over  # what was written before the end is there now: look once more
                if not ended:
                    await asyncio.sleep(_TAIL_INTERVAL)

    @contextlib.contextmanager
    def _joined(self) -> Iterator[CoreWorker]:
        if self._own is not None and self._own.dead is None:
            yield self._own  # threads of the program need not wait for each other
            return
        with _one_at_a_time, attached(self._session_dir) as process:
            yield process


class _Packages:
    """The packages of a runtime_env, whose paths become their URIs.

    Attributes:
        digests: by field.
        contents: by digest.
    """

    def __init__(self, env: RuntimeEnv) -> None:
        self.digests: dict[str, list[str]] = {}
        self.contents: dict[str, bytes] = {}
        excludes = env.get("excludes") or []
        working_dir = env.get("working_dir")
        if working_dir and not working_dir.startswith(IN_PLACE):
            dict.__setitem__(env, "working_dir", self._packed("working_dir", working_dir, excludes))
        if modules := env.get("py_modules"):
            sources = [path_of_module(module) for module in modules]
            uris = [self._packed("py_modules", source, excludes) for source in sources]
            dict.__setitem__(env, "py_modules", uris)

    def _packed(self, field: str, source: str, excludes: list[str]) -> str:
        package = package_of(source, excludes, inside=field == "py_modules")
        digest = package_digest(package)
        self.contents[digest] = package
        self.digests.setdefault(field, []).append(digest)
        return package_uri(digest)


def _checked_env(given: dict[str, Any]) -> RuntimeEnv:
    hook = given.get("worker_process_setup_hook") if isinstance(given, dict) else None
    if hook and not isinstance(hook, str):
        raise ValueError(
            f"Invalid type {type(hook)} for `worker_process_setup_hook`. When a job submission API is used, "
            "`worker_process_setup_hook` only allows a string type (module name). Specify `worker_process_setup_hook` "
            "via ray.init within a driver to use a `Callable` type. "
        )
    env = validated_runtime_env(given)
    if problem := unsupported_field_error(env):
        raise ValueError(problem)
    return env


def _submit(process: CoreWorker, request: JobSubmitRequest, env: RuntimeEnv, packages: _Packages) -> str:
    ident, table = request.submission_id or "", JobTable(process)
    if "/" in ident or not ident.isprintable() or len(ident.encode()) > _LONGEST_ID:
        what = f"at most {_LONGEST_ID} bytes, no slash and no control character: it is part of the name of a file"
        _refuse(400, f"{ident!r} is no submission_id; hint: {what}")
    shown = env.to_dict()
    fields = asdict(request)
    for name in ("submission_id", "entrypoint_label_selector"):
        del fields[name]
    fields["runtime_env"] = shown
    for name in ("entrypoint_num_cpus", "entrypoint_num_gpus", "entrypoint_memory"):
        fields[name] = fields[name] or 0
    if not table.add(ident, JobInfo(JobStatus.PENDING, start_time=int(time.time() * 1000), **fields)):
        _refuse(400, f"Job with submission_id {ident} already exists. Please use a different submission_id.")
    try:
        for digest, package in packages.contents.items():
            table.put_package(ident, digest, package)
        own = RuntimeEnv(_validate=False, env_vars=env.env_vars() or None)  # all else is set up by the supervisor
        own.inherits = False
        supervisor = make_actor_class(JobSupervisor, ActorOptions({})).options(
            name=JOB_ACTOR_NAME_TEMPLATE.format(job_id=ident),
            namespace=SUPERVISOR_ACTOR_RAY_NAMESPACE,
            lifetime="detached",
            num_cpus=request.entrypoint_num_cpus or 0,
            num_gpus=request.entrypoint_num_gpus or 0,
            memory=request.entrypoint_memory or None,
            resources=request.entrypoint_resources or None,
            runtime_env=own,
            **_place(process, request),
        )
        of_driver = {k: v for k, v in shown.items() if k not in ("excludes", *packages.digests)}
        supervisor.remote(ident, packages.digests, of_driver, os.environ.get(RAY_LIBRARIES, ""))
    except BaseException:
        table.delete(ident)
        raise
    return ident


def _place(process: CoreWorker, request: JobSubmitRequest) -> dict[str, Any]:
    """Options of the supervisor that say on which node it runs."""
    if request.entrypoint_label_selector:
        return {"label_selector": request.entrypoint_label_selector}
    if request.has_place or os.environ.get(_ALLOW_ANY_NODE) == "1":
        return {}
    head = next(row["NodeID"] for row in process.gcs.nodes() if row["Index"] == process.place.head)
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(head, soft=False)}


def _details(process: CoreWorker, job_id: str) -> JobDetails:
    """Return a job by either id.

    Raises:
        RuntimeError: there is none.
    """
    aggregator = StateAggregator(process, _TIMEOUT)
    row = aggregator.submitted_job(job_id)
    if row is None:
        row = next((row for row in aggregator.jobs() if row.job_id == job_id), None)
    if row is None:
        _refuse(404, f"Job {job_id} does not exist")
    return _details_of(row)


def _details_of(row: JobState) -> JobDetails:
    return JobDetails(**row.asdict())


def _submission(process: CoreWorker, job_id: str, action: str) -> JobDetails:
    """Return a submitted job.

    Raises:
        RuntimeError: there is none of this id, or it was not submitted.
    """
    job = _details(process, job_id)
    if job.type is not JobType.SUBMISSION:
        _refuse(400, f"Can only {action} submission type jobs")
    return job


def _more(process: CoreWorker, job_id: str, start: int) -> tuple[bytes, bool]:
    """Return a piece of a job's log, and whether the job had ended before."""
    job = _submission(process, job_id, "get logs of")
    return _read_log(process, job, start), job.status.is_terminal()


def _read_log(process: CoreWorker, job: JobDetails, start: int) -> bytes:
    if job.driver_node_id is None:
        return b""
    name = JOB_LOGS_PATH_TEMPLATE.format(submission_id=job.submission_id)
    try:
        return LogReader(process, _TIMEOUT).read(job.driver_node_id, name, start)
    except LogError as error:
        _refuse(500, str(error))


def _refuse(code: int, text: str) -> NoReturn:
    """Raise what Ray's client does for an answer of the HTTP server."""
    raise RuntimeError(f"Request failed with status code {code}: {text}.")


def _new_id() -> str:
    return "raysubmit_" + "".join(random.SystemRandom().choices(_ID_CHARACTERS, k=_ID_LENGTH))
