"""Names of `ray._private` and `ray._common` that other packages read, one section for each module.

`hpcray.compat.table` lists which names belong to which module of Ray.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import inspect
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from hpcray.api.placement_group import PlacementGroupID, placement_group_table
from hpcray.api.runtime_context import ACCELERATORS, available_resources, cluster_resources, nodes
from hpcray.api.session import require_session
from hpcray.common.ids import show_proc
from hpcray.compat.names import JobID
from hpcray.compat.names.cluster_config import get_cluster_config, get_max_resources_from_cluster_config
from hpcray.experimental.internal_kv import _internal_kv_put
from hpcray.platform import resource_limits
from hpcray.platform.gpu_visibility import gpu_type, node_gpus
from hpcray.platform.log_format import TEXT_FORMAT
from hpcray.platform.session_directory import session_root
from hpcray.platform.sockets import node_ip_address
from hpcray.runtime.core_worker.core_worker import current, need_process
from hpcray.state.reports import show_stores
from hpcray.util.state import list_jobs, list_workers

# -------------------------------------------------------------------- ray._private.ray_constants, runtime_env.constants

DEFAULT_DASHBOARD_IP = "127.0.0.1"
DEFAULT_DASHBOARD_PORT = 8265
DEFAULT_PORT = 6379
NOSET_CUDA_VISIBLE_DEVICES_ENV_VAR = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
CUDA_VISIBLE_DEVICES_ENV_VAR = "CUDA_VISIBLE_DEVICES"
RAY_ADDRESS_ENVIRONMENT_VARIABLE = "RAY_ADDRESS"
RAY_NAMESPACE_ENVIRONMENT_VARIABLE = "RAY_NAMESPACE"
RAY_JOB_CONFIG_JSON_ENV_VAR = "RAY_JOB_CONFIG_JSON_ENV_VAR"
RESOURCE_CONSTRAINT_PREFIX = "accelerator_type:"
HEAD_NODE_RESOURCE_NAME = "node:__internal_head__"
NODE_ID_PREFIX = "node:"
KV_NAMESPACE_PACKAGE = b"package"
DEBUG_AUTOSCALING_STATUS = "__autoscaling_status"
LOGGER_FORMAT = TEXT_FORMAT
RAY_DEDUP_LOGS = os.environ.get("RAY_DEDUP_LOGS", "1") not in ("0", "false", "False")
RAY_RUNTIME_ENV_PLUGINS_ENV_VAR = "RAY_RUNTIME_ENV_PLUGINS"
_MEMORY_SUMMARY_ROWS = 100
_MIB = 1 << 20
_ALL_ROWS = 10_000
_MEMORY_SUMMARY_TIMEOUT = 10.0  # seconds


def env_integer(key: str, default: int) -> int:
    """Return an environment variable as a number, or the default where it is unset or no number."""
    value = os.environ.get(key, "")
    return int(value) if value.lstrip("-").isdigit() else default


def env_float(key: str, default: float) -> float:
    """Return an environment variable as a number, or the default where it is unset or no number."""
    try:
        return float(os.environ[key])
    except (KeyError, ValueError):
        return default


def env_bool(key: str, default: bool) -> bool:
    """Return True if an environment variable is "true" or "1", the default where it is unset."""
    if key not in os.environ:
        return default
    return os.environ[key].lower() in ("true", "1")


def env_set_by_user(key: str) -> Any:
    return key in os.environ


# -------------------------------------------------------------------- ray._private.utils, ray._common.utils


def get_ray_temp_dir() -> str:
    """Return the directory of this user's session directories on this node."""
    return session_root(os.environ)


def get_user_temp_dir() -> str:
    """Return the directory for temporary files, the parent of `get_ray_temp_dir()`."""
    return os.path.dirname(session_root(os.environ))


def get_system_memory() -> int:
    """Return the memory that this node may use, in bytes."""
    return int(resource_limits.usable_memory())


def get_num_cpus() -> int:
    return int(resource_limits.cpus_per_rank(1))


hex_to_binary = binascii.unhexlify
is_async_func = inspect.iscoroutinefunction


def binary_to_hex(data: bytes) -> str:
    return data.hex()


def decode(text: Any, allow_none: bool = False, encode_type: str = "utf-8") -> str:
    """Decode bytes as text; text is returned unchanged."""
    if text is None and allow_none:
        return ""
    return text.decode(encode_type) if isinstance(text, bytes) else str(text)


def get_or_create_event_loop() -> asyncio.AbstractEventLoop:
    """Return this thread's running event loop, else its current one, else a new one that becomes the current."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        pass
    try:
        return asyncio.get_event_loop_policy().get_event_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop


# -------------------------------------------------------------------- ray._common.network_utils, ray._private.services


def build_address(host: str, port: int | str) -> str:
    """Join host and port to `host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if is_ipv6(host) else f"{host}:{port}"


def parse_address(address: str) -> tuple[str, str] | None:
    """Split an address into (host, port). Returns None for an address without a port."""
    if ":" not in address:
        return None
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], port
    return None if ":" in host and "://" not in host else (host, port)


def is_ipv6(host: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6, host)
    except OSError:
        return False
    return True


def is_localhost(host: str) -> bool:
    """Return True for a name or address of the loopback interface."""
    return host in ("localhost", "127.0.0.1", "::1")


def get_localhost_ip() -> str:
    return "127.0.0.1"


def find_free_port(family: socket.AddressFamily = socket.AF_INET) -> int:
    """Return a TCP port that was free at the time of the call."""
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


get_node_ip_address = node_ip_address

# -------------------------------------------------------------------- ray._private.accelerators


class AcceleratorManager(ABC):
    """Base class of accelerator types. hpcray calls no subclass of it."""

    @staticmethod
    @abstractmethod
    def get_resource_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_visible_accelerator_ids_env_var() -> str:
        """Return the environment variable that lists the visible devices of a process."""

    @staticmethod
    @abstractmethod
    def get_current_node_num_accelerators() -> int:
        """Return the number of devices of this node."""

    @staticmethod
    @abstractmethod
    def get_current_node_accelerator_type() -> str | None:
        """Return the device type of this node."""


class NvidiaGPUAcceleratorManager(AcceleratorManager):
    """The NVIDIA GPUs of this node."""

    @staticmethod
    def get_resource_name() -> str:
        return "GPU"

    @staticmethod
    def get_visible_accelerator_ids_env_var() -> str:
        return CUDA_VISIBLE_DEVICES_ENV_VAR

    @staticmethod
    def get_current_process_visible_accelerator_ids() -> list[str] | None:
        """Return the ids of the visible devices of this process; None for all."""
        text = os.environ.get(CUDA_VISIBLE_DEVICES_ENV_VAR)
        if text is None:
            return None
        return [] if text in ("", "NoDevFiles") else text.split(",")

    @staticmethod
    def set_current_process_visible_accelerator_ids(visible_cuda_devices: list[str]) -> None:
        """Set the visible devices of this process, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set."""
        if not os.environ.get(NOSET_CUDA_VISIBLE_DEVICES_ENV_VAR):
            os.environ[CUDA_VISIBLE_DEVICES_ENV_VAR] = ",".join(map(str, visible_cuda_devices))

    @staticmethod
    def get_current_node_num_accelerators() -> int:
        """Return the number of devices of this node."""
        return len(node_gpus(None, 1))

    @staticmethod
    def get_current_node_accelerator_type() -> str | None:
        """Return Ray's name of the GPU type; None for an unknown type."""
        return gpu_type() or None


def get_all_accelerator_managers() -> set[type[AcceleratorManager]]:
    """Return the accelerator types that hpcray detects."""
    return {NvidiaGPUAcceleratorManager}


def get_all_accelerator_resource_names() -> set[str]:
    """Return the names of the resources that count devices."""
    return set(ACCELERATORS)


def get_accelerator_manager_for_resource(resource_name: str) -> type[AcceleratorManager] | None:
    """Return the accelerator type that the resource counts, or None."""
    return NvidiaGPUAcceleratorManager if resource_name == "GPU" else None


# -------------------------------------------------------------------- ray._private.internal_api


def global_gc() -> None:
    """Have every worker and driver of the job run Python's garbage collector, soon.

    Raises:
        RaySystemError: hpcray is not initialized.
    """
    need_process().request_global_gc()


def memory_summary(address: str | None = None, *_: Any, stats_only: bool = False, **__: Any) -> str:
    """Return the text that `hpcray memory` prints for the job of this process, then sums in Ray's form.

    Args:
        address: without effect, as are Ray's arguments for sorting and grouping.
        stats_only: whether to return the sums only.

    Raises:
        RaySystemError: hpcray is not initialized.
    """
    limit = 0 if stats_only else _MEMORY_SUMMARY_ROWS
    rows = need_process().diagnostics.list_stores(limit, _MEMORY_SUMMARY_TIMEOUT)
    tables = [] if stats_only else list(show_stores(rows))
    return "\n".join([*tables, *_store_sums([row for row in rows if not row["problem"]])])


def _store_sums(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The lines that programs of Ray's look for."""

    def total(name: str) -> int:
        return int(sum(row[name] for row in rows))

    used, capacity = total("used"), max(1, total("capacity"))
    full, needed = (round(100 * part / capacity, 2) for part in (used, used - total("evictable")))
    yield "--- Aggregate object store stats across all nodes ---"
    yield f"Plasma memory usage {used // _MIB} MiB, {total('objects')} objects, {full}% full, {needed}% needed"
    if total("overflow"):
        yield f"Plasma filesystem mmap usage: {total('overflow') // _MIB} MiB"
    if spilled := total("spilled_bytes"):
        speed = int(spilled / _MIB / max(1e-6, sum(row["spill_seconds"] for row in rows)))
        yield f"Spilled {spilled // _MIB} MiB, {total('spilled_objects')} objects, avg write throughput {speed} MiB/s"
    if total("loaded_bytes"):
        yield f"Restored {total('loaded_bytes') // _MIB} MiB, {total('restored')} objects"
    if total("queued") or total("waiting"):
        yield "Object fetches queued, waiting for available memory."


# -------------------------------------------------------------------- ray._private.state


def available_resources_per_node() -> dict[str, dict[str, float]]:
    """Return the free resources of each live node by node id, without resources that are used up, as in Ray."""
    rows = _per_node("available")
    return {node: {name: amount for name, amount in row.items() if amount} for node, row in rows.items()}


def total_resources_per_node() -> dict[str, dict[str, float]]:
    """Return the total resources of each live node by node id."""
    return {row["NodeID"]: dict(row["Resources"]) for row in nodes() if row["Alive"]}


def actors(actor_id: str | None = None) -> dict[str, Any]:
    """Return the rows of all actors by id, or the row of one actor; {} for an unknown id."""
    process = require_session()
    by_index = {row["Index"]: row for row in nodes()}
    found = {row["actor"].hex(): _actor_row(row, by_index) for row in process.gcs.call("actors")}
    if actor_id is not None:
        return found.get(actor_id if isinstance(actor_id, str) else actor_id.hex(), {})
    return found


def node_ids() -> list[str]:
    """Return the node resources (`node:<address>`) of the live nodes."""
    return [
        name
        for row in nodes()
        if row["Alive"]
        for name in row["Resources"]
        if name.startswith("node:") and name != "node:__internal_head__"
    ]


def workers() -> dict[str, dict[str, str]]:
    """Return the living workers by id."""
    return {
        row.worker_id: {"node_ip_address": row.ip, "plasma_store_socket": ""}
        for row in list_workers(limit=_ALL_ROWS)
        if row.is_alive and row.worker_type == "WORKER"
    }


def jobs() -> list[dict[str, Any]]:
    """Return one row for each job that can be queried."""
    return [
        {
            "JobID": row.job_id,
            "DriverIPAddress": (row.driver_info or {}).get("node_ip_address", ""),
            "DriverPid": int((row.driver_info or {}).get("pid") or 0),
            "Timestamp": 0,
            "StartTime": row.start_time or 0,
            "EndTime": row.end_time or 0,
            "IsDead": row.status in ("STOPPED", "SUCCEEDED", "FAILED"),
            "Entrypoint": row.entrypoint,
        }
        for row in list_jobs(limit=_ALL_ROWS)
    ]


def next_job_id() -> JobID:
    """Return a job id that no call has returned before."""
    number = max((JobID.from_hex(row["JobID"]).int() for row in jobs() if row["JobID"]), default=0) + 1
    while _internal_kv_put(f"{number}", b"", overwrite=False, namespace="__job_ids"):
        number += 1
    return JobID.from_int(number)


def current_node_id() -> str:
    """Return the resource that only this node has, `node:<address>`."""
    return f"{NODE_ID_PREFIX}{node_ip_address()}"


class GlobalState:
    """Ray's object with the same tables as methods."""

    def _check_connected(self) -> None:
        require_session()

    _really_init_global_state = _check_connected

    def _initialize_global_state(self, gcs_options: Any = None) -> None:
        require_session()

    def disconnect(self) -> None:
        """No effect."""

    node_table = staticmethod(nodes)
    job_table = staticmethod(jobs)
    workers = staticmethod(workers)
    next_job_id = staticmethod(next_job_id)
    get_cluster_config = staticmethod(get_cluster_config)
    get_max_resources_from_cluster_config = staticmethod(get_max_resources_from_cluster_config)
    cluster_resources = staticmethod(cluster_resources)
    available_resources = staticmethod(available_resources)
    available_resources_per_node = _available_resources_per_node = staticmethod(available_resources_per_node)
    total_resources_per_node = _total_resources_per_node = staticmethod(total_resources_per_node)

    def get_node(self, node_id: str) -> dict[str, Any] | None:
        """Return the row of one node; None for an unknown id."""
        return next((row for row in nodes() if row["NodeID"] == node_id), None)

    def _live_node_ids(self) -> set[str]:
        return {row["NodeID"] for row in nodes() if row["Alive"]}

    def actor_table(self, actor_id: str | None = None, **_: Any) -> dict[str, Any]:
        """Return the rows of all actors, or of one, as `actors()`."""
        return actors(actor_id)

    def placement_group_table(self, placement_group_id: Any = None) -> dict[str, Any]:
        """Return the row of one placement group, or all rows by id."""
        if placement_group_id is None:
            return placement_group_table()
        return placement_group_table(PlacementGroupID(_bytes(placement_group_id)))

    @property
    def global_state_accessor(self) -> Any:
        """This object; None outside a job, as in Ray."""
        return self if current.process is not None else None


state = GlobalState()


def _per_node(what: str) -> dict[str, dict[str, float]]:
    process = require_session()
    ids = {row["Index"]: row["NodeID"] for row in process.gcs.nodes()}
    status = process.gcs.call("status")
    return {ids[row["index"]]: dict(row[what]) for row in status["nodes"] if row["index"] in ids}


def _actor_row(row: dict[str, Any], by_index: dict[int, dict[str, Any]]) -> dict[str, Any]:
    node = by_index.get(row["node"], {})
    job = require_session().job
    return {
        "ActorID": row["actor"].hex(),
        "ActorClassName": row["class_name"],
        "IsDetached": row["detached"],
        "Name": row["name"],
        "RayNamespace": row["namespace"],
        "JobID": job.job_id if job else "",
        "Address": {"IPAddress": node.get("NodeManagerAddress", ""), "Port": 0, "NodeID": node.get("NodeID", "")},
        "OwnerAddress": {"WorkerID": row["owner"].hex() if row["owner"] else ""},
        "State": row["state"],
        "NumRestarts": row["restarts"],
        "DeathCause": row["reason"],
        "Worker": show_proc(row["worker"]) if row["worker"] else "",
    }


def _bytes(ident: Any) -> bytes:
    return bytes.fromhex(ident) if isinstance(ident, str) else bytes(ident)
