"""`ray._private.worker`: the role of this process in the job, by Ray's private names."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import cloudpickle as pickle  # programs read it here

from hpcray.api.objects import wait
from hpcray.api.runtime_context import get_runtime_context
from hpcray.api.session import ClientContext, post_init_hooks, require_session
from hpcray.common.exceptions import ObjectLostError
from hpcray.common.ids import PUT_INDEX, owner_of, task_of
from hpcray.common.job_names import logs_directory
from hpcray.compat.names.ids import ActorID, ClusterID, JobID, NodeID, PlacementGroupID, TaskID, WorkerID
from hpcray.compat.names.ray_constants import LOCAL_MODE, SCRIPT_MODE, WORKER_MODE, logger
from hpcray.compat.names.serialization_context import SerializationContext
from hpcray.compat.names.state import GcsClient
from hpcray.core.core_worker.object_entry import INLINE, STORED
from hpcray.platform.log_format import rotation_limits
from hpcray.platform.private_files import make_private_directory
from hpcray.platform.sockets import node_ip_address
from hpcray.protocol.messages.objects import is_error
from hpcray.protocol.serialization import deserialize
from hpcray.runtime.core_worker.core_worker import CoreWorker, current
from hpcray.runtime.core_worker.generators import ObjectRefGenerator
from hpcray.runtime.core_worker.object_reader import UnhandledErrors, log_unhandled
from hpcray.runtime.core_worker.object_refs import ObjectRef
from hpcray.runtime.core_worker.worker_output import print_to_stdstream, print_worker_logs
from hpcray.runtime.worker import actor_event_loop

# ------------------------------------------------------------ generator batches
# `ray._private.worker._wait_generators_bulk`: the next values of several generators, in batches.


_NAME = "_wait_generators_bulk()"
Batch = tuple[ObjectRefGenerator[Any], list[bool]]


def wait_for_batches(
    ray_generators: list[Batch], *, num_return: int = 1, timeout: float | None = None
) -> list[tuple[ObjectRefGenerator[Any], list[ObjectRef[Any]]]]:
    """Wait until batches of next values are there, and take them.

    Args:
        ray_generators: pairs of a generator and, for each value of its batch, whether that must be on this node.
        num_return: number of batches that are returned at most.
        timeout: in seconds; None waits without limit.

    Returns:
        Pairs of a generator and the refs of its whole batch.

    Raises:
        TypeError, ValueError: wrong arguments.
    """
    _check(ray_generators, num_return, timeout)
    if not ray_generators:
        return []
    deadline = None if timeout is None else time.monotonic() + timeout
    batches = [(generator, generator._get_next_ref_n(len(fetch)), fetch) for generator, fetch in ray_generators]
    ready, _ = wait([refs[-1] for _, refs, _ in batches], num_returns=num_return, timeout=timeout, fetch_local=False)
    here = set(ready)
    found = [batch for batch in batches if batch[1][-1] in here]
    wanted = {id(refs): [ref for ref, local in zip(refs, fetch, strict=True) if local] for _, refs, fetch in found}
    fetched: set[ObjectRef[Any]] = set()
    if any(wanted.values()):
        refs = [ref for batch in wanted.values() for ref in batch]
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        fetched.update(wait(refs, num_returns=len(refs), timeout=left)[0])
    result = []
    for generator, batch, _ in found:
        if fetched.issuperset(wanted[id(batch)]):
            generator._consume_next_ref_n(len(batch))
            result.append((generator, batch))
    return result


def _check(batches: Any, num_return: int, timeout: float | None) -> None:
    if not isinstance(batches, list):
        raise TypeError(f"{_NAME} expected a list of (ray.ObjectRefGenerator, list[bool]) tuples, got {type(batches)}")
    if timeout is not None and timeout < 0:
        raise ValueError(f"The 'timeout' argument must be nonnegative. Received {timeout}")
    for index, pair in enumerate(batches):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(
                f"{_NAME} expected each element to be a (generator, fetch_local_per_ref) tuple; got {type(pair)} at "
                f"index {index}"
            )
        generator, fetch = pair
        if not isinstance(generator, ObjectRefGenerator):
            raise TypeError(
                f"{_NAME} tuple first element must be ray.ObjectRefGenerator, got {type(generator)} at index {index}"
            )
        if not isinstance(fetch, list):
            raise TypeError(f"{_NAME} tuple second element must be list[bool], got {type(fetch)} at index {index}")
        if not fetch:
            raise ValueError(f"{_NAME} fetch_local_per_ref must be non-empty at index {index}")
        for place, local in enumerate(fetch):
            if not isinstance(local, bool):
                raise TypeError(
                    f"{_NAME} fetch_local_per_ref entries must be bool, got {type(local)} at index {index}, ref {place}"
                )
    if not batches:
        return
    if len({id(generator) for generator, _ in batches}) != len(batches):
        raise ValueError("_wait_generators_bulk requires a list of unique generators.")
    if num_return <= 0:
        raise ValueError(f"Invalid number of generators to return {num_return}.")
    if num_return > len(batches):
        raise ValueError(
            "num_return cannot be greater than the number of generators provided to _wait_generators_bulk."
        )


# ------------------------------------------------------------ worker


CHANGING = ("_global_node",)
"""Names whose value the facade must not cache."""

__all__ = [
    "LOCAL_MODE",
    "SCRIPT_MODE",
    "WORKER_MODE",
    "Worker",
    "_wait_generators_bulk",
    "global_worker",
    "logger",
    "pickle",
    "print_to_stdstream",
    "print_worker_logs",
]


def _unhandled_error_handler(error: BaseException) -> None:
    """Log an error that was never looked at. A program may set another function here."""
    log_unhandled(error)


def _report_unhandled(error: BaseException) -> None:
    module: Any = sys.modules.get("ray._private.worker") or sys.modules[__name__]
    module._unhandled_error_handler(error)


UnhandledErrors.reporters[:] = [_report_unhandled]

blocking_get_inside_async_warned = False
"""A program that sets it is not warned of a blocking get() in an async actor."""


def _blocking_is_expected() -> bool:
    module: Any = sys.modules.get("ray._private.worker") or sys.modules[__name__]
    return bool(module.blocking_get_inside_async_warned)


actor_event_loop.expected_blocks.append(_blocking_is_expected)


_post_init_hooks = post_init_hooks
"""Called without arguments at the end of each `init()`; libraries append to it."""

BaseContext = RayContext = ClientContext
"""The type of the context that `init()` returns."""

for _arguments in ("NoArgs", *range(10)):  # for annotations, as RemoteFunction2[int, str, float]
    _name = f"RemoteFunction{_arguments}"
    globals()[_name] = type(_name, (), {"__class_getitem__": classmethod(lambda cls, _: cls)})

_ANSWER_TIMEOUT = 0.2
"""Seconds for which `object_exists` waits for the answer of an owner, and of the store."""


def _stands_for_actor(process: CoreWorker, oid: bytes) -> bool:
    """Return True for the object that the handles of an actor count on, which is no program's."""
    return oid.endswith(PUT_INDEX) and process.submitter.actors.state_of(task_of(oid)) is not None


class _CoreWorker:
    """The methods of Ray's core worker that programs call."""

    def current_actor_is_asyncio(self) -> bool:
        host = current.worker.actor if current.worker is not None else None
        return host is not None and host.is_async

    def get_current_task_id(self) -> TaskID:
        return TaskID.from_hex(get_runtime_context().get_task_id() or "")

    def get_pending_children_task_ids(self, parent_task_id: TaskID) -> list[TaskID]:
        """Return the tasks and calls not yet finished that this process submitted for `parent_task_id`: the task that
        runs here, one of the calls that run in this actor, or the program itself."""
        process, worker, parent = require_session(), current.worker, parent_task_id.binary()
        with process.engine.lock:
            process.drain()
            pending = process.submitter.cancellation.pending_children
            if worker is None:
                found = pending(lambda task: True) if parent_task_id == self.get_current_task_id() else []
            elif worker.actor is not None:
                found = pending(lambda task: getattr(task, "parent", b"") == parent)
            else:
                found = pending(worker.is_child) if worker.running == parent else []
        return [TaskID(task.id) for task in found]

    def get_actor_id(self) -> ActorID:
        return ActorID.from_hex(get_runtime_context().get_actor_id() or "")

    def get_worker_id(self) -> WorkerID:
        return WorkerID(require_session().me)

    def get_current_job_id(self) -> JobID:
        return JobID.from_hex(get_runtime_context().get_job_id())

    def get_current_node_id(self) -> NodeID:
        return NodeID.from_hex(require_session().place.node_id)

    def get_all_reference_counts(self) -> dict[bytes, dict[str, int]]:
        """Return how many refs the program holds ("local"), and its unfinished tasks mention ("submitted"), by object
        id in hex. The handles of actors are none, as in Ray."""
        process = require_session()
        rows = process.diagnostics.introspect("references", [])
        return {
            oid.hex().encode(): {"local": local, "submitted": submitted}
            for oid, local, submitted in rows
            if not _stands_for_actor(process, oid)
        }

    def object_exists(self, object_ref: ObjectRef[Any], memory_store_only: bool = False) -> bool:
        """Return True if the value is in this process or, unless `memory_store_only`, in this node's store."""
        process = require_session()
        if owner_of(object_ref._id) != process.me:
            process.waits.wait([object_ref], 1, _ANSWER_TIMEOUT, False)
        entry = process.table.entries.get(object_ref._id)
        if (
            entry is not None
            and entry.state == STORED
            and entry.mapping is None
            and process.node in (entry.nodes or ())
        ):
            # Perhaps the store has dropped it with its owner.
            process.waits.wait([object_ref], 1, _ANSWER_TIMEOUT, True)
        with process.engine.lock:
            process.drain()
            entry = process.table.entries.get(object_ref._id)
            if entry is None:
                return False
            stored = entry.mapping is not None
            process.table.unmap(object_ref._id)
            process.engine.flush()
            if stored or entry.state != INLINE:
                return stored and not memory_store_only
            return not (is_error(entry.value) and isinstance(deserialize(entry.value), ObjectLostError))

    def get_memory_store_size(self) -> int:
        """Return how many values this process keeps in its own memory."""
        return len(self._sizes_of_values())

    def get_local_memory_store_bytes_used(self) -> int:
        """Return how many bytes these values take."""
        return sum(self._sizes_of_values())

    def _sizes_of_values(self) -> list[int]:
        process = require_session()
        with process.engine.lock:
            process.drain()
            return [
                len(entry.value)
                for oid, entry in process.table.entries.items()
                if entry.state == INLINE and not _stands_for_actor(process, oid)
            ]

    def add_object_out_of_scope_callback(self, object_ref: ObjectRef[Any], callback: Callable[[bytes], object]) -> bool:
        """Call `callback(id)` once no ref to an object of this process is left anywhere, and no task that takes it.

        The callbacks of a process run in one thread of their own; each must be quick. What one raises is printed.

        Returns:
            False, and the callback is never called, where that is so already.

        Raises:
            ValueError: another process owns the object.
        """
        return require_session().reader.when_out_of_scope(object_ref, callback)

    def get_disable_job_level_lineage_reconstruction(self) -> bool:
        """Return False: lost objects are made again unless the task, or HPCRAY_LINEAGE_LIMIT=0, forbids it."""
        return require_session().config.lineage_limit == 0

    def global_gc(self) -> None:
        """Have all processes of the job collect their garbage, soon."""
        require_session().request_global_gc()


class _GlobalNode:
    """The attributes of Ray's node object that programs read."""

    def __init__(self, process: CoreWorker) -> None:
        self._process = process
        self.node_ip_address = node_ip_address()
        self.raylet_ip_address = self.node_ip_address
        self.unique_id = self.node_id = process.place.node_id
        self.gcs_address = self.address = process.place.session_dir
        self.session_name = get_runtime_context().get_session_name()

    def get_session_dir_path(self) -> str:
        return self._process.place.session_dir

    def get_logs_dir_path(self) -> str:
        """Return the directory of this node's log files, which exists."""
        path = logs_directory(self._process.place.session_dir)
        make_private_directory(path)
        return path

    @property
    def cluster_id(self) -> ClusterID:
        """Id of the cluster: that of its first node."""
        return ClusterID.from_hex(self._process.gcs.nodes()[0]["NodeID"])

    @property
    def max_bytes(self) -> int:
        """Size from which on a log file is rotated."""
        return rotation_limits()[0]

    @property
    def backup_count(self) -> int:
        """How many rotated log files are kept."""
        return rotation_limits()[1]

    def get_temp_dir_path(self) -> str:
        """Return the parent directory of the session directory."""
        return os.path.dirname(self._process.place.session_dir.rstrip("/"))

    def is_head(self) -> bool:
        return self._process.node == self._process.place.head

    @property
    def address_info(self) -> dict[str, Any]:
        """Addresses and directories of this node, by Ray's names."""
        return {
            "node_ip_address": self.node_ip_address,
            "node_id": self.node_id,
            "session_dir": self._process.place.session_dir,
            "address": self._process.place.session_dir,
            "gcs_address": self._process.place.session_dir,
        }


_OF_CONTEXT = {
    "current_node_labels": "get_node_labels",
    "current_temp_dir": "get_temp_dir",
    "is_canceled": "is_canceled",
}
_OF_WORKERS = {
    "actor_name": "actor_name",
    "current_task_name": "task_name",
    "current_task_function_name": "task_function_name",
}
"""Attributes of `Worker` by what the runtime context calls them; those of workers are "" in a driver."""


class Worker:
    """Ray's object for this process. There is one: `global_worker`."""

    core_worker = _CoreWorker()
    _filter_logs_by_job = True  # without effect when set: a driver shows what its own workers print
    _serialization_context = SerializationContext()

    def get_serialization_context(self) -> SerializationContext:
        """Return how values become bytes in this process.

        Raises:
            RaySystemError: it is not inside a job.
        """
        self.check_connected()
        return self._serialization_context

    @property
    def connected(self) -> bool:
        """True inside a job."""
        return current.process is not None

    @property
    def mode(self) -> int | None:
        """SCRIPT_MODE in a driver, WORKER_MODE in a worker, None outside a job."""
        if current.process is None:
            return None
        return WORKER_MODE if current.worker is not None else SCRIPT_MODE

    @property
    def gcs_client(self) -> GcsClient:
        """The client of the GCS."""
        self.check_connected()
        return GcsClient()

    @property
    def node(self) -> Any:
        """This node; None outside a job."""
        return __getattr__("_global_node")

    @property
    def worker_id(self) -> bytes:
        return self._process.me

    @property
    def current_job_id(self) -> JobID:
        """Id of the job; nil outside one."""
        return JobID.from_hex(get_runtime_context().get_job_id()) if self.connected else JobID.nil()

    @property
    def current_node_id(self) -> NodeID:
        return NodeID.from_hex(self._process.place.node_id)

    @property
    def current_task_id(self) -> TaskID:
        """Id of the running task; nil in a driver."""
        ident = get_runtime_context().get_task_id() if current.worker is not None else None
        return TaskID.from_hex(ident) if ident else TaskID.nil()

    @property
    def actor_id(self) -> ActorID:
        """Id of this actor; nil elsewhere."""
        ident = get_runtime_context().get_actor_id() if current.worker is not None else None
        return ActorID.from_hex(ident) if ident else ActorID.nil()

    @property
    def placement_group_id(self) -> PlacementGroupID:
        """Id of the placement group in force; nil for none."""
        ident = get_runtime_context().get_placement_group_id()
        return PlacementGroupID.from_hex(ident) if ident else PlacementGroupID.nil()

    @property
    def should_capture_child_tasks_in_placement_group(self) -> bool:
        """True if child tasks run in the placement group in force."""
        return get_runtime_context().should_capture_child_tasks_in_placement_group

    @property
    def current_cluster_and_job(self) -> tuple[ClusterID, JobID]:
        """Ids of the cluster and of the job."""
        self.check_connected()
        return self.node.cluster_id, self.current_job_id

    @property
    def namespace(self) -> str:
        return get_runtime_context().namespace

    @property
    def node_ip_address(self) -> str:
        return node_ip_address()

    @property
    def runtime_env(self) -> dict[str, Any]:
        """Runtime environment of the job or task."""
        return get_runtime_context().runtime_env

    @staticmethod
    def worker_paused_by_debugger() -> contextlib.AbstractContextManager[None]:
        """Have `list_workers` and `list_tasks` say that this thread waits in a debugger."""
        from hpcray.diagnostics.debugger import paused  # it loads pdb

        return paused()

    task_paused_by_debugger = worker_paused_by_debugger

    def check_connected(self) -> None:
        """Raise RaySystemError outside a job."""
        self._process  # noqa: B018

    @property
    def _process(self) -> CoreWorker:
        if current.process is None:
            from hpcray.exceptions import RaySystemError

            raise RaySystemError("hpcray is not initialized; hint: call ray.init() first")
        return current.process

    def __getattr__(self, name: str) -> Any:
        if name in _OF_CONTEXT:
            return getattr(get_runtime_context(), _OF_CONTEXT[name])()
        if name in _OF_WORKERS:
            return (getattr(get_runtime_context(), f"get_{_OF_WORKERS[name]}")() if current.worker else None) or ""
        raise AttributeError(f"hpcray does not have ray._private.worker.global_worker.{name}")


global_worker = Worker()


def _mode(worker: Worker = global_worker) -> int | None:
    """Return the role of this process, see `Worker.mode`."""
    return worker.mode


def __getattr__(name: str) -> Any:
    if name == "_global_node":
        return _GlobalNode(current.process) if current.process is not None else None
    raise AttributeError(name)


_wait_generators_bulk = wait_for_batches
