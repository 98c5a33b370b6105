"""What a program can ask about where it runs: node, job, task, actor, resources."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hpcray.base.resources import Resources, to_amounts
from hpcray.host.runtime_env import RuntimeEnv
from hpcray.wire.messages import JobInfo

logger = logging.getLogger(__name__)

ACCELERATORS = ("GPU", "TPU", "NPU", "HPU", "neuron_cores", "RBLN", "FURIOSA", "MBLT", "TTNPU")
"""Resource names that `get_accelerator_ids` always lists, so that a lookup never fails."""


@dataclass(frozen=True)
class RunningTask:
    """The task or actor call that the calling thread or coroutine runs. `name` is the user's, or the function's."""

    id: bytes
    name: str
    function_name: str
    cancelled: bool = False


@dataclass(frozen=True)
class RunningActor:
    """The actor that this process is. `handle` makes a handle to it."""

    id: bytes
    name: str
    restarts: int
    is_async: bool
    handle: Callable[[], Any]


class ContextSource(Protocol):
    """What a `RuntimeContext` reads from its process. All of it is about now: nothing is cached."""

    @property
    def me(self) -> bytes:
        """Proc id."""

    @property
    def node_id(self) -> str:
        """Of this node, in hex."""

    @property
    def kind(self) -> str:
        """ "driver", "attached" or "worker"."""

    @property
    def job(self) -> JobInfo | None:
        """None until the driver has said which."""

    @property
    def session_dir(self) -> str:
        """Of this node."""

    def head_address(self) -> str:
        """How people name the head of this cluster, for example "host:session"."""

    def running_task(self) -> RunningTask | None:
        """Of the calling thread or coroutine; None in a driver."""

    def running_actor(self) -> RunningActor | None:
        """None where this process is no actor."""

    def held_resources(self) -> Resources:
        """Units that the current task or actor holds."""

    def placement_group(self) -> tuple[str, bool]:
        """Id (in hex) of the placement group that it runs in, "" for none; whether children run in it too."""

    def environment(self) -> Mapping[str, Any]:
        """Its runtime_env; empty for none."""

    def accelerator_ids(self) -> Mapping[str, list[str]]:
        """Ids of the devices it may use, by resource name; absent means none."""

    def node_labels(self) -> Mapping[str, str]:
        """The labels of this node."""


class HexId(str):
    """An id in hex that also has the methods of Ray's id objects, for the deprecated properties."""

    __slots__ = ()

    def hex(self) -> str:
        """The id in hex."""
        return str(self)

    def binary(self) -> bytes:
        """The id's bytes."""
        return bytes.fromhex(self)

    def is_nil(self) -> bool:
        """Whether there is no id."""
        return not self


class RuntimeContext:
    """Answers about the process, task or actor that asks.

    Args:
        source: gives the process, or None where hpcray is not initialized.
    """

    def __init__(self, source: Callable[[], ContextSource | None]) -> None:
        self._find = source

    # ------------------------------------------------------------ process, node, job

    def get_node_id(self) -> str:
        """Id of this node, in hex.

        Raises:
            RuntimeError: hpcray is not initialized. So with all methods.
        """
        return self._source("Node ID").node_id

    def get_worker_id(self) -> str:
        """Id of this process, in hex."""
        return self._source("Worker ID").me.hex()

    def get_job_id(self) -> str:
        """Id of the job, in hex."""
        job = self._source("Job ID").job
        return job.job_id if job else ""

    def get_session_name(self) -> str:
        """Name of the cluster's session, the same in all its processes."""
        return f"session_{self.get_job_id()}"

    def get_temp_dir(self) -> str:
        """The directory that holds the session directories of this user on this node."""
        return os.path.dirname(self._source("Temp directory").session_dir.rstrip("/"))

    def get_node_labels(self) -> dict[str, str]:
        """Labels of this node."""
        source = self._source("Node labels")
        return {"ray.io/node-id": source.node_id, **source.node_labels()}

    @property
    def namespace(self) -> str:
        """Namespace of the job: where names of actors are looked up."""
        job = self._source("Namespace").job
        return job.namespace if job else ""

    @property
    def gcs_address(self) -> str:
        """How to name this cluster's head."""
        return self._source("GCS address").head_address()

    # ------------------------------------------------------------ task and actor

    def get_task_id(self) -> str | None:
        """Id of the task that asks, in hex; None in a driver."""
        task = self._task("Task ID")
        return task.id.hex() if task else None

    def get_task_name(self) -> str | None:
        """The task's option `name`, or what it calls; None in a driver."""
        task = self._task("Task name")
        return task.name if task else None

    def get_task_function_name(self) -> str | None:
        """Module and name of the function that the task calls; None in a driver."""
        task = self._task("Task function name")
        return task.function_name if task else None

    def is_canceled(self) -> bool:
        """Whether `cancel()` was called for the task that asks.

        Raises:
            RuntimeError: in a driver, and in an async actor (there the coroutine gets a CancelledError).
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
        """Id of the actor that asks, in hex; None elsewhere."""
        actor = self._source("Actor ID").running_actor()
        return actor.id.hex() if actor else None

    def get_actor_name(self) -> str | None:
        """Name of the actor that asks, "" if it has none; None elsewhere."""
        actor = self._source("Actor name").running_actor()
        return actor.name if actor else None

    @property
    def current_actor(self) -> Any:
        """A handle to the actor that asks.

        Raises:
            RuntimeError: this process is no actor.
        """
        actor = self._source("Actor handle").running_actor()
        if actor is None:
            raise RuntimeError("This method is only available in an actor.")
        return actor.handle()

    @property
    def was_current_actor_reconstructed(self) -> bool:
        """Whether the actor that asks was restarted.

        Raises:
            AssertionError: this process is no actor.
        """
        actor = self._source("Actor state").running_actor()
        if actor is None:
            raise AssertionError("was_current_actor_reconstructed is for actors; this process is none")
        return actor.restarts != 0

    # ------------------------------------------------------------ resources and environment

    def get_assigned_resources(self) -> dict[str, float]:
        """Amounts that the task or actor that asks holds, by name; {} for an actor with default options.

        Raises:
            AssertionError: in a driver.
        """
        source = self._source("Assigned resources")
        if source.kind != "worker":
            raise AssertionError(f"get_assigned_resources() is for tasks and actors; this process is a {source.kind}")
        return to_amounts(source.held_resources())

    def get_accelerator_ids(self) -> dict[str, list[str]]:
        """Ids of the devices that the task or actor may use, by resource name; an empty list for none."""
        found = self._source("Accelerator IDs").accelerator_ids()
        return {name: list(found.get(name, ())) for name in dict.fromkeys((*ACCELERATORS, *found))}

    @property
    def runtime_env(self) -> RuntimeEnv:
        """The runtime environment of the task, actor or driver that asks."""
        return RuntimeEnv(_validate=False, **self._source("Runtime environment").environment())

    def get_runtime_env_string(self) -> str:
        """`runtime_env` as JSON."""
        return json.dumps(self.runtime_env)

    def get_placement_group_id(self) -> str | None:
        """Id of the placement group that the task or actor runs in, in hex; None for none."""
        return self._source("Placement group ID").placement_group()[0] or None

    @property
    def should_capture_child_tasks_in_placement_group(self) -> bool:
        """Whether tasks started from here use the same placement group."""
        return self._source("Placement group").placement_group()[1]

    # ------------------------------------------------------------ deprecated

    def get(self) -> dict[str, Any]:
        """Deprecated: ids by name."""
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

    # ------------------------------------------------------------ inside

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
    warnings.warn(f"RuntimeContext.{name} is deprecated; use {instead}", DeprecationWarning, stacklevel=3)
