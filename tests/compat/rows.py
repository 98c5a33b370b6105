"""The rows of the table of names: what real programs use of Ray 2.60, in the order of how the tests go through it."""

from __future__ import annotations

from typing import NamedTuple

import pytest


class Row(NamedTuple):
    """One row. importance: MUST, SHOULD or COULD."""

    section: str
    name: str
    importance: str


_CORE, _OPTIONS, _UTIL, _PRIVATE = "Top level", "Options", "ray.util, ray.experimental", "Private names"

ROWS = [
    Row(_CORE, "ray.init", "MUST"),
    Row(_CORE, "auto-init", "MUST"),
    Row(_CORE, "ray.shutdown, ray.is_initialized", "MUST"),
    Row(_CORE, "ray.remote", "MUST"),
    Row(_CORE, ".remote(), .options().remote()", "MUST"),
    Row(_CORE, "ray.get", "MUST"),
    Row(_CORE, "ray.put", "MUST"),
    Row(_CORE, "ray.wait", "MUST"),
    Row(_CORE, "ray.kill", "MUST"),
    Row(_CORE, "ray.cancel", "SHOULD"),
    Row(_CORE, "ray.get_actor", "MUST"),
    Row(_CORE, "ray.method", "SHOULD"),
    Row(_CORE, "ray.nodes", "MUST"),
    Row(_CORE, "ray.cluster_resources, ray.available_resources", "MUST"),
    Row(_CORE, "ray.get_gpu_ids", "MUST"),
    Row(_CORE, "ray.get_runtime_context", "MUST"),
    Row(_CORE, "ray.ObjectRef, ray.ObjectID", "MUST"),
    Row(_CORE, "ray.ObjectRefGenerator, DynamicObjectRefGenerator", "SHOULD"),
    Row(_CORE, "ray.actor: ActorHandle, ActorClass, ActorMethod, exit_actor", "MUST"),
    Row(_CORE, "ray.exceptions", "MUST"),
    Row(_CORE, "ray.cloudpickle", "MUST"),
    Row(_CORE, "ray.timeline", "SHOULD"),
    Row(_CORE, "ray.__version__, metadata version", "MUST"),
    Row(_CORE, "ray.runtime_env.RuntimeEnv", "MUST"),
    Row(_CORE, "ray.job_submission", "COULD"),
    Row(_CORE, "ray.util.client, ray://", "COULD"),
    Row(_CORE, "ray.cluster_utils.Cluster", "SHOULD"),
    Row(_CORE, "ray.LoggingConfig, ray.logger", "COULD"),
    Row(_OPTIONS, "num_cpus, num_gpus", "MUST"),
    Row(_OPTIONS, "resources", "MUST"),
    Row(_OPTIONS, "memory, object_store_memory", "SHOULD"),
    Row(_OPTIONS, "accelerator_type", "COULD"),
    Row(_OPTIONS, "name, namespace, get_if_exists, lifetime", "MUST"),
    Row(_OPTIONS, "scheduling_strategy", "MUST"),
    Row(_OPTIONS, "placement_group, placement_group_bundle_index (legacy)", "MUST"),
    Row(_OPTIONS, "label_selector, fallback_strategy", "SHOULD"),
    Row(_OPTIONS, "runtime_env", "MUST"),
    Row(_OPTIONS, "num_returns", "MUST"),
    Row(_OPTIONS, "max_retries, retry_exceptions", "SHOULD"),
    Row(_OPTIONS, "max_calls", "SHOULD"),
    Row(_OPTIONS, "max_restarts, max_task_retries", "SHOULD"),
    Row(_OPTIONS, "max_concurrency", "MUST"),
    Row(_OPTIONS, "concurrency_groups", "SHOULD"),
    Row(_OPTIONS, "max_pending_calls, allow_out_of_order_execution", "COULD"),
    Row(_OPTIONS, "enable_task_events, _labels", "SHOULD"),
    Row(_OPTIONS, "_generator_backpressure_num_objects", "SHOULD"),
    Row(_UTIL, "placement_group", "MUST"),
    Row(_UTIL, "PlacementGroup", "MUST"),
    Row(
        _UTIL, "remove_placement_group, placement_group_table, get_current_placement_group, get_placement_group", "MUST"
    ),
    Row(_UTIL, "PlacementGroupSchedulingStrategy", "MUST"),
    Row(_UTIL, "NodeAffinitySchedulingStrategy", "MUST"),
    Row(_UTIL, "NodeLabelSchedulingStrategy", "COULD"),
    Row(_UTIL, "util.get_node_ip_address", "MUST"),
    Row(_UTIL, "util.queue.Queue", "SHOULD"),
    Row(_UTIL, "util.ActorPool, ActorGroup, as_completed, map_unordered", "SHOULD"),
    Row(_UTIL, "util.list_named_actors", "SHOULD"),
    Row(_UTIL, "util.state, experimental.state.api", "SHOULD"),
    Row(_UTIL, "util.collective", "SHOULD"),
    Row(_UTIL, "util.metrics", "SHOULD"),
    Row(_UTIL, "util.multiprocessing.Pool", "SHOULD"),
    Row(_UTIL, "util.joblib.register_ray", "SHOULD"),
    Row(_UTIL, "util.dask", "SHOULD"),
    Row(_UTIL, "util.iter", "COULD"),
    Row(_UTIL, "util.tracing", "COULD"),
    Row(_UTIL, "util.register_serializer, deregister_serializer", "SHOULD"),
    Row(_UTIL, "util.inspect_serializability", "COULD"),
    Row(_UTIL, "util.annotations, util.debug.log_once, util.timer", "SHOULD"),
    Row(_UTIL, "experimental.internal_kv", "SHOULD"),
    Row(_UTIL, "experimental.tqdm_ray", "COULD"),
    Row(_UTIL, "experimental.get_object_locations", "COULD"),
    Row(_UTIL, "experimental.shuffle", "COULD"),
    Row(_UTIL, "compiled graphs, .bind()", "COULD"),
    Row(_UTIL, "RDT: tensor_transport", "COULD"),
    Row(_UTIL, "object spilling", "SHOULD"),
    Row(_UTIL, "ray.internal.free", "COULD"),
    Row(_UTIL, "log_to_driver, prefixes", "SHOULD"),
    Row(_UTIL, "command line: start, stop, status", "SHOULD"),
    Row(_PRIVATE, "ray._private.services.get_node_ip_address", "MUST"),
    Row(_PRIVATE, "ray._private.state", "MUST"),
    Row(_PRIVATE, "ray._private.worker.global_worker", "MUST"),
    Row(_PRIVATE, "ray._private.worker._global_node", "MUST"),
    Row(_PRIVATE, "ray._private.worker: printing", "SHOULD"),
    Row(_PRIVATE, "ray._private.utils", "SHOULD"),
    Row(_PRIVATE, "ray._private.ray_option_utils", "COULD"),
    Row(_PRIVATE, "ray._private.auto_init_hook", "COULD"),
    Row(_PRIVATE, "ray._private.dict, inspect_util, label_utils, path_utils", "COULD"),
    Row(_PRIVATE, "ray._private.accelerators", "SHOULD"),
    Row(_PRIVATE, "ray._private.runtime_env.constants, packaging, nsight", "SHOULD"),
    Row(_PRIVATE, "ray._private.log_monitor", "COULD"),
    Row(_PRIVATE, "ray._private.client_mode_hook", "SHOULD"),
    Row(_PRIVATE, "ray._raylet", "MUST"),
    Row(_PRIVATE, "ray.actor._modify_class", "COULD"),
    Row(_PRIVATE, "ray.remote_function.RemoteFunction", "SHOULD"),
    Row(_PRIVATE, "ray.dashboard.utils", "COULD"),
    Row(_PRIVATE, "ray.tune, train, data, serve, rllib", "COULD"),
]

NAMES = {row.name for row in ROWS}


def row(name: str, *, differs: str = "", missing: str = "") -> pytest.MarkDecorator:
    """This test shows what a row of the table promises.

    Args:
        name: of the row.
        differs: what is not as in Ray, and why; the test shows how it is here.
        missing: why hpcray does not have it; the test shows that it says so.
    """
    assert name in NAMES, f"no row {name!r}"
    return pytest.mark.row(name, differs=differs, missing=missing)
