"""Facts about the calling task, actor, process and job, and about the nodes of the cluster."""

from __future__ import annotations

import importlib
import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from hpcray.api.actor_handle import ActorHandle
from hpcray.api.session import require_session
from hpcray.common.exceptions import RaySystemError
from hpcray.common.resources import ACCELERATORS, Resources, plain, to_amounts
from hpcray.platform.accelerators import assigned_accelerators, assigned_gpus, gpu_ids_are_indices
from hpcray.runtime.core_worker.context import async_task
from hpcray.runtime.core_worker.core_worker import CoreWorker, current
from hpcray.runtime_env.runtime_env import RuntimeEnv
from hpcray.runtime_env.submitted_runtime_env import RuntimeEnvs, public_runtime_env

logger = logging.getLogger(__name__)


class RunningTask(Struct, frozen=True):
    """The task or actor call of the calling thread or coroutine. `name`: the option, else the function's name."""

    id: bytes
    name: str
    function_name: str
    cancelled: bool = False


class RunningActor(Struct, frozen=True):
    """The actor of this process. `handle` makes a handle of it."""

    id: bytes
    name: str
    restarts: int
    is_async: bool
    handle: Callable[[], Any]


class ContextSource:
    """Facts about one process for a `RuntimeContext`, which takes a new one for each question.

    Args:
        process: the calling process.
    """

    def __init__(self, process: CoreWorker) -> None:
        self._process = process
        self.me, self.node_id, self.kind = process.me, process.place.node_id, process.place.kind
        self.job, self.session_dir = process.place.job, process.place.session_dir

    def running_task(self) -> RunningTask | None:
        worker = current.worker
        running = async_task.get() or self._process.local.task
        if running is None or worker is None:
            return None
        name, function_name = worker.names_of(running)
        return RunningTask(running.task, name, function_name, running.task in worker.cancelled)

    def running_actor(self) -> RunningActor | None:
        host = current.worker.actor if current.worker is not None else None
        if host is None:
            return None
        spec = host.spec

        def handle() -> ActorHandle:
            return ActorHandle(
                spec.actor, spec.class_name, spec.methods, spec.max_task_retries, spec.max_pending_calls, None,
                spec.out_of_order,
            )  # fmt: skip

        return RunningActor(spec.actor, spec.name, host.restarts, host.is_async, handle)

    def held_resources(self) -> Resources:
        """Return the resource units that the current task or actor holds."""
        worker = current.worker
        if worker is None:
            return {}
        return (
            plain(dict(worker.actor.spec.hold.resources)) if worker.actor is not None else dict(worker.lease.resources)
        )

    def placement_group(self) -> tuple[str, bool]:
        """Return the current placement group (id in hex, "" for none) and True if child tasks run in it too."""
        return self._process.placement_groups.running_in, self._process.placement_groups.captures

    def environment(self) -> Mapping[str, Any]:
        """Return the runtime_env of the current task or actor; empty for none."""
        env_vars = {
            **dict(self.job.env if self.job else ()),
            **(current.worker.lease.env if current.worker is not None else {}),
        }
        return public_runtime_env(RuntimeEnvs.of(self._process).job, env_vars)

    def accelerator_ids(self) -> Mapping[str, list[str]]:
        """Return the ids of the assigned devices by resource name, without resources that have none."""
        return {"GPU": assigned_gpus(), **assigned_accelerators()}

    def node_labels(self) -> Mapping[str, str]:
        rows = [row for row in self._process.gcs.nodes() if row["NodeID"] == self._process.place.node_id]
        return dict(rows[0]["Labels"]) if rows else {}


class HexId(str):
    """An id in hex with the methods of Ray's id objects, for the deprecated properties."""

    __slots__ = ()

    def hex(self) -> str:
        """Return the id in hex."""
        return str(self)

    def binary(self) -> bytes:
        """Return the id as bytes."""
        return bytes.fromhex(self)

    def is_nil(self) -> bool:
        """Return True for the empty id."""
        return not self


class RuntimeContext:
    """Facts about the calling process, task or actor.

    Args:
        source: returns the `ContextSource`, or None where hpcray is not initialized.
    """

    def __init__(self, source: Callable[[], ContextSource | None]) -> None:
        self._find = source

    def get_node_id(self) -> str:
        """Return the id of this node, in hex.

        Raises:
            RuntimeError: hpcray is not initialized; all methods and properties raise it.
        """
        return self._source("Node ID").node_id

    def get_worker_id(self) -> str:
        """Return the id of this process, in hex."""
        return self._source("Worker ID").me.hex()

    def get_job_id(self) -> str:
        """Return the id of the job, in hex."""
        job = self._source("Job ID").job
        return job.job_id if job else ""

    def get_session_name(self) -> str:
        """Return the name of the session, the same in all processes of the job."""
        return f"session_{self.get_job_id()}"

    def get_temp_dir(self) -> str:
        """Return the directory of this user's session directories on this node."""
        return os.path.dirname(self._source("Temp directory").session_dir.rstrip("/"))

    def get_node_labels(self) -> dict[str, str]:
        """Return the labels of this node."""
        source = self._source("Node labels")
        return {"ray.io/node-id": source.node_id, **source.node_labels()}

    @property
    def namespace(self) -> str:
        """Namespace of the job, in which named actors are looked up."""
        job = self._source("Namespace").job
        return job.namespace if job else ""

    @property
    def gcs_address(self) -> str:
        """Address of the head."""
        return self._source("GCS address").session_dir

    def get_task_id(self) -> str | None:
        """Return the id of the current task, in hex; None in a driver."""
        task = self._task("Task ID")
        return task.id.hex() if task else None

    def get_task_name(self) -> str | None:
        """Return the option `name` of the current task, else its function's name; None in a driver."""
        task = self._task("Task name")
        return task.name if task else None

    def get_task_function_name(self) -> str | None:
        """Return module and name of the current task's function; None in a driver."""
        task = self._task("Task function name")
        return task.function_name if task else None

    def is_canceled(self) -> bool:
        """Return True if `cancel()` was called for the current task.

        Raises:
            RuntimeError: in a driver, and in an async actor, whose coroutine gets CancelledError instead.
        """
        source = self._source("Cancellation state")
        if source.kind != "worker":
            raise RuntimeError(f"is_canceled() is for tasks and actors; this process is a {source.kind}")
        actor = source.running_actor()
        if actor is not None and actor.is_async:
            raise RuntimeError("This method is not supported in an async actor.")
        task = source.running_task()
        return task is not None and task.cancelled

    def get_actor_id(self) -> str | None:
        """Return the id of this actor, in hex; None in other processes."""
        actor = self._source("Actor ID").running_actor()
        return actor.id.hex() if actor else None

    def get_actor_name(self) -> str | None:
        """Return the name of this actor, "" for none; None in other processes."""
        actor = self._source("Actor name").running_actor()
        return actor.name if actor else None

    @property
    def current_actor(self) -> Any:
        """Handle of this actor.

        Raises:
            RuntimeError: this process is no actor.
        """
        actor = self._source("Actor handle").running_actor()
        if actor is None:
            raise RuntimeError("This method is only available in an actor.")
        return actor.handle()

    @property
    def was_current_actor_reconstructed(self) -> bool:
        """True if this actor was restarted.

        Raises:
            AssertionError: this process is no actor.
        """
        actor = self._source("Actor state").running_actor()
        if actor is None:
            raise AssertionError("This method is only available in an actor; this process is none.")
        return actor.restarts != 0

    def get_assigned_resources(self) -> dict[str, float]:
        """Return the resource amounts that the current task or actor holds; {} for an actor with default options.

        Raises:
            AssertionError: in a driver.
        """
        source = self._source("Assigned resources")
        if source.kind != "worker":
            raise AssertionError(
                f"This method is only available when the process is a worker. Current mode: {source.kind}"
            )
        return to_amounts(source.held_resources())

    def get_accelerator_ids(self) -> dict[str, list[str]]:
        """Return the ids of the assigned devices by resource name; an empty list for none."""
        found = self._source("Accelerator IDs").accelerator_ids()
        return {name: list(found.get(name, ())) for name in dict.fromkeys((*ACCELERATORS, *found))}

    @property
    def runtime_env(self) -> RuntimeEnv:
        """Runtime environment of the calling task, actor or driver."""
        return RuntimeEnv(_validate=False, **self._source("Runtime environment").environment())

    def get_runtime_env_string(self) -> str:
        """Return `runtime_env` as JSON."""
        return json.dumps(self.runtime_env)

    def get_placement_group_id(self) -> str | None:
        """Return the id of the current placement group, in hex; None for none."""
        return self._source("Placement group ID").placement_group()[0] or None

    @property
    def should_capture_child_tasks_in_placement_group(self) -> bool:
        """True if child tasks run in the current placement group."""
        return self._source("Placement group").placement_group()[1]

    @property
    def worker(self) -> Any:
        """Ray's object for this process, `ray._private.worker.global_worker`."""
        return importlib.import_module("hpcray.compat.names.worker").global_worker  # above this package

    def get(self) -> dict[str, Any]:
        """Deprecated: return the ids by name."""
        _deprecated("get()", "the get_xxx_id() methods")
        found: dict[str, Any] = {
            "job_id": HexId(self.get_job_id()),
            "node_id": HexId(self.get_node_id()),
            "namespace": self.namespace,
        }
        source = self._source("Context")
        task, actor = source.running_task(), source.running_actor()
        if task is not None:
            found["task_id"] = HexId(task.id.hex())
        if actor is not None:
            found["actor_id"] = HexId(actor.id.hex())
        return found

    @property
    def job_id(self) -> HexId:
        """Deprecated: `get_job_id()`."""
        _deprecated("job_id", "get_job_id()")
        return HexId(self.get_job_id())

    @property
    def node_id(self) -> HexId:
        """Deprecated: `get_node_id()`."""
        _deprecated("node_id", "get_node_id()")
        return HexId(self.get_node_id())

    @property
    def task_id(self) -> HexId | None:
        """Deprecated: `get_task_id()`."""
        _deprecated("task_id", "get_task_id()")
        return _optional(self.get_task_id())

    @property
    def actor_id(self) -> HexId | None:
        """Deprecated: `get_actor_id()`."""
        _deprecated("actor_id", "get_actor_id()")
        return _optional(self.get_actor_id())

    @property
    def current_placement_group_id(self) -> HexId | None:
        """Deprecated: `get_placement_group_id()`."""
        _deprecated("current_placement_group_id", "get_placement_group_id()")
        return _optional(self.get_placement_group_id())

    def get_resource_ids(self) -> dict[str, list[str]]:
        """Deprecated: `get_accelerator_ids()`."""
        _deprecated("get_resource_ids()", "get_accelerator_ids()")
        return self.get_accelerator_ids()

    def _source(self, what: str) -> ContextSource:
        source = self._find()
        if source is None:
            raise RuntimeError(f"{what} is not available because hpcray has not been initialized; hint: call init()")
        return source

    def _task(self, what: str) -> RunningTask | None:
        source = self._source(what)
        if source.kind != "worker":
            logger.warning("%s is only available in tasks and actors; this process is a %s", what, source.kind)
            return None
        return source.running_task()


def _optional(ident: str | None) -> HexId | None:
    return None if ident is None else HexId(ident)


def _deprecated(name: str, instead: str) -> None:
    warnings.warn(f"RuntimeContext.{name} is deprecated. Use {instead} instead", DeprecationWarning, stacklevel=3)


def _source() -> ContextSource | None:
    return ContextSource(current.process) if current.process is not None else None


_context = RuntimeContext(_source)


def get_runtime_context() -> RuntimeContext:
    """Return the context of the caller: node, job, task and actor."""
    require_session()
    return _context


def get_gpu_ids() -> list[int] | list[str]:
    """Return the ids of the GPUs that the current task or actor holds; [] for none, and in a driver.

    The ids are numbers from 0 on each node. Where a visibility variable (`CUDA_VISIBLE_DEVICES`, on AMD
    `ROCR_VISIBLE_DEVICES` or `HIP_VISIBLE_DEVICES`) was set before the node started, the ids are its entries.
    """
    require_session()
    ids = assigned_gpus()
    return [int(name) for name in ids] if gpu_ids_are_indices() else ids


def nodes() -> list[dict[str, Any]]:
    """Return one row for each node of the cluster: id, address, "Alive", resources. All ports are 0.

    Raises:
        RaySystemError: hpcray is not initialized.
    """
    return [_as_in_ray(row) for row in _started().gcs.nodes()]


def cluster_resources() -> dict[str, float]:
    """Return the total resources of the live nodes, by name.

    Raises:
        RaySystemError: hpcray is not initialized.
    """
    found: dict[str, float] = _started().gcs.call("cluster_resources")
    return found


def available_resources() -> dict[str, float]:
    """Return the free resources of the live nodes, by name, as last reported to the head.

    What this process holds for tasks that may come is returned before.

    Raises:
        RaySystemError: hpcray is not initialized.
    """
    process = _started()
    with process.engine.lock:
        process.submitter.leases.return_idle()
    found: dict[str, float] = process.gcs.call("available_resources")
    return found


def _started() -> CoreWorker:
    """Return the process. Queries of the cluster's state do not call `init()`, as in Ray."""
    if current.process is None:
        raise RaySystemError("Ray has not been started yet. hint: call init() before asking for the cluster's state")
    return current.process


_PORTS = ("DashboardAgentListenPort", "MetricsAgentPort", "RuntimeEnvAgentPort")
_ALIVE, _UNEXPECTED = 0, 2


def _as_in_ray(row: dict[str, Any]) -> dict[str, Any]:
    reason = row["DeathReason"]
    dead = {"DeathReason": _UNEXPECTED if reason else _ALIVE, "DeathReasonMessage": reason, "alive": row["Alive"]}
    return {**row, **dict.fromkeys(_PORTS, 0), **dead}
