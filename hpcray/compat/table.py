"""The modules of Ray that hpcray serves, the modules of hpcray that each is made of, and why the others are missing.

A source is a module of hpcray (`"hpcray.util.queue"`), or some names of one (`"hpcray.compat.names.utils:decode"`,
several separated by spaces). The first source that has a name provides it.
"""

from __future__ import annotations

from typing import Any

from hpcray.common.ray_version import RAY_VERSION, claimed_version

_NAMES = "hpcray.compat.names"
_IDS = "ActorClassID ActorID ClusterID FunctionID JobID NodeID PlacementGroupID TaskID UniqueID WorkerID"
_UTILS = (
    f"{_NAMES}.utils:binary_to_hex decode get_num_cpus get_or_create_event_loop get_ray_temp_dir get_system_memory "
    "get_user_temp_dir hex_to_binary is_async_func"
)
_MORE_COMMON_UTILS = (
    f"{_NAMES}.utils:PLACEMENT_GROUP_BUNDLE_RESOURCE_NAME Timer TimerBase get_default_system_temp_dir "
    "get_default_ray_temp_dir get_function_args get_random_alphanumeric_string get_ray_address_file import_attr "
    "import_module_and_attr load_class reset_ray_address resources_from_ray_options run_background_task "
    "try_to_create_directory",
    f"{_NAMES}.ray_constants:RESOURCE_CONSTRAINT_PREFIX env_bool env_float env_integer",
)
_MORE_PRIVATE_UTILS = (
    f"{_NAMES}.utils:DeferSigint INT32_MAX estimate_available_memory format_error_message get_ray_doc_version "
    "get_used_memory is_in_test open_log"
)
_ACCELERATORS = f"{_NAMES}.accelerators"
_ACCELERATOR_MODULES = (
    "accelerator", "amd_gpu", "furiosa", "hpu", "intel_gpu", "mblt", "neuron", "npu", "nvidia_gpu", "rbln", "ttnpu",
)  # fmt: skip
_CONSTANTS = (
    f"{_NAMES}.ray_constants:CUDA_VISIBLE_DEVICES_ENV_VAR DEBUG_AUTOSCALING_STATUS DEFAULT_DASHBOARD_IP "
    "DEFAULT_DASHBOARD_PORT DEFAULT_PORT HEAD_NODE_RESOURCE_NAME KV_NAMESPACE_PACKAGE LOGGER_FORMAT NODE_ID_PREFIX "
    "NOSET_CUDA_VISIBLE_DEVICES_ENV_VAR RAY_ADDRESS_ENVIRONMENT_VARIABLE RAY_DEDUP_LOGS RAY_JOB_CONFIG_JSON_ENV_VAR "
    "RAY_NAMESPACE_ENVIRONMENT_VARIABLE RESOURCE_CONSTRAINT_PREFIX env_bool env_float env_integer "
    "env_set_by_user"
)
_MORE_CONSTANTS = (
    f"{_NAMES}.ray_constants:CALLER_MEMORY_USAGE_PER_OBJECT_REF DEFAULT_MAX_CONCURRENCY_ASYNC "
    "DEFAULT_OBJECT_STORE_MEMORY_PROPORTION DEFAULT_SYSTEM_RESERVED_MEMORY_PROPORTION DEFAULT_TASK_MAX_RETRIES GPU HPU "
    "ID_SIZE KV_NAMESPACE_DASHBOARD KV_NAMESPACE_JOB KV_NAMESPACE_PDB MIN_RESOURCE_GRANULARITY NEURON_CORES NPU "
    "NUM_REDIS_GET_RETRIES "
    "RAY_DEDUP_LOGS_AGG_WINDOW_S RAY_DEDUP_LOGS_ALLOW_REGEX RAY_DEDUP_LOGS_SKIP_REGEX RAY_ENABLE_EXPORT_API_WRITE "
    "RAY_ENABLE_EXPORT_API_WRITE_CONFIG RAY_EXPORT_EVENT_MAX_BACKUP_COUNT RAY_EXPORT_EVENT_MAX_FILE_SIZE_BYTES TPU"
)
_LOG_CONSTANTS = (
    "hpcray.common.job_names:LOG_PREFIX_ACTOR_NAME LOG_PREFIX_INFO_MESSAGE LOG_PREFIX_JOB_ID LOG_PREFIX_TASK_NAME",
    "hpcray.runtime.core_worker.worker_output:TESTING_NEVER_DEDUP_TOKEN",
)
_LOG = (
    "INTERNAL_TIMESTAMP_LOG_KEY PlainRayHandler _setup_log_record_factory clear_logger generate_logging_config "
    "logger_initialized"
)
_STATE = (
    "GlobalState actors available_resources available_resources_per_node cluster_resources current_node_id jobs "
    "next_job_id node_ids nodes state total_resources_per_node workers"
)

MODULES: dict[str, tuple[str, ...]] = {
    "ray": (
        f"{_NAMES}.ray_constants:LOCAL_MODE SCRIPT_MODE WORKER_MODE Language",
        f"{_NAMES}.ray_constants:logger",
        f"{_NAMES}.ids:{_IDS}",
        f"{_NAMES}.ray_constants:_config",
        f"{_NAMES}.ray_client:ClientBuilder client java_actor_class java_function",
        "hpcray",
    ),
    "ray.actor": (f"{_NAMES}.option_utils:_make_actor _modify_class", "hpcray.actor", "hpcray.api.actor"),
    "ray.autoscaler": (),
    "ray.autoscaler._private": (),
    "ray.autoscaler._private.constants": (f"{_NAMES}.ray_constants:LOGGER_FORMAT",),
    "ray.autoscaler.sdk": (f"{_NAMES}.autoscaler:request_resources",),
    "ray.cloudpickle": ("cloudpickle", f"{_NAMES}.serialization_context:dump_debug dumps_debug"),
    "ray.cloudpickle.cloudpickle": ("cloudpickle.cloudpickle",),
    "ray.cluster_utils": ("hpcray.compat.cluster_utils",),
    "ray.core": (),
    "ray.core.generated": (),
    "ray.core.generated.autoscaler_pb2": (f"{_NAMES}.autoscaler:ClusterConfig NodeGroupConfig",),
    "ray.data": (f"{_NAMES}.util:from_pandas_refs",),
    "ray.dashboard": (),
    "ray.dashboard.modules": (),
    "ray.dashboard.modules.dashboard_sdk": (f"{_NAMES}.serve_submission:parse_runtime_env_args",),
    "ray.dashboard.modules.job": (),
    "ray.dashboard.modules.job.common": (
        "hpcray.state.job_table:JobErrorType JobInfo JobStatus",
        "hpcray.common.job_names:JOB_ACTOR_NAME_TEMPLATE JOB_ID_METADATA_KEY JOB_LOGS_PATH_TEMPLATE "
        "JOB_NAME_METADATA_KEY SUPERVISOR_ACTOR_RAY_NAMESPACE",
        "hpcray.job_submission.job_submission_client:JobSubmitRequest",
    ),
    "ray.dashboard.modules.job.sdk": ("hpcray.job_submission:JobSubmissionClient",),
    "ray.dashboard.modules.metrics": (),
    "ray.dashboard.modules.serve": (),
    "ray.dashboard.modules.serve.sdk": (f"{_NAMES}.serve_submission:ServeSubmissionClient",),
    "ray.dashboard.utils": ("hpcray.job_submission.cluster_address:get_address_for_submission_client",),
    "ray.exceptions": ("hpcray.exceptions",),
    "ray.log": (f"{_NAMES}.log:{_LOG}",),
    "ray.job_config": (f"{_NAMES}.job_config:JobConfig", "hpcray:LoggingConfig"),
    "ray.job_submission": ("hpcray.job_submission",),
    "ray.remote_function": ("hpcray.api.remote_function",),
    "ray.runtime_context": ("hpcray.api.runtime_context:RuntimeContext", "hpcray:get_runtime_context"),
    "ray.runtime_env": ("hpcray.runtime_env",),
    "ray.ray_constants": (_CONSTANTS, *_LOG_CONSTANTS),
    "ray.scripts": (),
    "ray.scripts.scripts": (f"{_NAMES}.serve_submission:cli main",),
    "ray.worker": (f"{_NAMES}.worker", "hpcray"),
    "ray.train": (),
    "ray.train._internal": (),
    "ray.train._internal.session": (f"{_NAMES}.util:get_session",),
    "ray.state": (f"{_NAMES}.state:{_STATE}",),
    "ray.types": ("hpcray:ObjectRef",),
    "ray._raylet": (
        f"{_NAMES}.ids:BaseID {_IDS}",
        f"{_NAMES}.state:GcsClient",
        f"{_NAMES}.serialization_context:SerializedObject",
        f"{_NAMES}.raylet:AuthenticationMode AuthenticationTokenLoader get_authentication_mode "
        "validate_authentication_token",
        "hpcray:DynamicObjectRefGenerator ObjectID ObjectRef ObjectRefGenerator",
        "hpcray.runtime.worker.replies:StreamingGeneratorStats",
        f"{_NAMES}.raylet",
        f"{_NAMES}.utils:build_address get_all_interfaces_ip get_localhost_ip is_ipv6 is_localhost "
        "node_ip_address_from_perspective parse_address",
    ),
    # -------------------------------------------------------------------- util
    "ray.util": ("hpcray.util", f"{_NAMES}.util:get_node_instance_id pdb", f"{_NAMES}.ray_client:connect disconnect"),
    "ray.util.accelerators": ("hpcray.util.accelerators",),
    "ray.util.accelerators.accelerators": ("hpcray.util.accelerators",),
    "ray.util.actor_group": ("hpcray.util.actor_pool:ActorGroup ActorGroupMethod ActorMetadata ActorWrapper",),
    "ray.util.actor_pool": ("hpcray.util.actor_pool",),
    "ray.util.annotations": ("hpcray.util.annotations",),
    "ray.util.check_serialize": ("hpcray.util.serialization:FailureTuple inspect_serializability",),
    "ray.client_builder": (f"{_NAMES}.ray_client:ClientBuilder client", "hpcray.api.session:ClientContext"),
    "ray.util.client_connect": (f"{_NAMES}.ray_client:connect disconnect",),
    "ray.util.client": (f"{_NAMES}.ray_client:RayAPIStub num_connected_contexts ray",),
    "ray.util.client.common": (
        f"{_NAMES}.ray_client:ClientActorClass ClientActorHandle ClientActorRef ClientObjectRef ClientRemoteFunc",
    ),
    "ray.util.collective": ("hpcray.util.collective",),
    "ray.util.collective.collective": ("hpcray.util.collective", f"{_NAMES}.utils:get_address_and_port"),
    "ray.util.collective.types": ("hpcray.util.collective",),
    "ray.util.dask": ("hpcray.util.dask",),
    "ray.util.dask.callbacks": ("hpcray.util.dask.callbacks",),
    "ray.util.dask.common": ("hpcray.util.dask.scheduler:unpack_object_refs",),
    "ray.util.dask.optimizations": ("hpcray.util.dask.scheduler:dataframe_optimize",),
    "ray.util.dask.scheduler": ("hpcray.util.dask.scheduler",),
    "ray.util.dask.scheduler_utils": ("hpcray.util.dask.scheduler_utils",),
    "ray.util.debug": ("hpcray.util.debug", f"{_NAMES}.util:Suspect _test_some_code_for_memory_leaks"),
    "ray.util.helpers": ("hpcray.util.helpers",),
    "ray.util.joblib": ("hpcray.util.joblib",),
    "ray.util.joblib.ray_backend": ("hpcray.util.joblib.ray_backend",),
    "ray.util.metrics": ("hpcray.util.metrics",),
    "ray.util.multiprocessing": ("hpcray.util.multiprocessing",),
    "ray.util.multiprocessing.pool": ("hpcray.util.multiprocessing.pool",),
    "ray.util.placement_group": (
        "hpcray.util.placement_group",
        f"{_NAMES}.util:_valid_resource_shape _validate_bundle_label_selector _validate_bundles "
        "validate_placement_group",
    ),
    "ray.util.queue": ("hpcray.util.queue",),
    "ray.util.rpdb": (f"{_NAMES}.rpdb",),
    "ray.util.scheduling_strategies": ("hpcray.util.scheduling_strategies",),
    "ray.util.serialization": (
        "hpcray.util.serialization",
        f"{_NAMES}.serialization_context:StandaloneSerializationContext",
    ),
    "ray.util.state": ("hpcray.util.state",),
    "ray.util.state.api": ("hpcray.util.state",),
    "ray.util.state.common": ("hpcray.state.schemas", "hpcray.state.summaries"),
    "ray.util.state.exception": ("hpcray.util.state:DataSourceUnavailable RayStateApiException ServerUnavailable",),
    "ray.util.state.util": (f"{_NAMES}.util:convert_string_to_type",),
    "ray.util.timer": ("hpcray.util.debug:_Timer",),
    "ray.util.tracing": ("hpcray.util.tracing",),
    "ray.util.tracing.setup_local_tmp_tracing": ("hpcray.util.tracing.setup_local_tmp_tracing",),
    "ray.util.tracing.tracing_helper": ("hpcray.util.tracing.tracing_helper",),
    # -------------------------------------------------------------------- graphs
    "ray.dag": ("hpcray.dag",),
    "ray.dag.base": ("hpcray.graphs.dag_node:DAGNodeBase",),
    "ray.dag.class_node": ("hpcray.graphs.nodes:ClassMethodNode ClassNode _UnboundClassMethodNode",),
    "ray.dag.compiled_dag_node": ("hpcray.graphs.compiled_dag_node",),
    "ray.dag.constants": (
        "hpcray.graphs.dag_node:BIND_INDEX_KEY COLLECTIVE_OPERATION_KEY DAGNODE_TYPE_KEY "
        "IS_CLASS_METHOD_OUTPUT_KEY PARENT_CLASS_NODE_KEY PREV_CLASS_METHOD_CALL_KEY",
    ),
    "ray.dag.context": ("hpcray.graphs.compiled_dag_ref:DAGContext",),
    "ray.dag.dag_node": ("hpcray.graphs.dag_node",),
    "ray.dag.format_utils": ("hpcray.graphs.dag_node:get_dag_node_str",),
    "ray.dag.function_node": ("hpcray.graphs.nodes:FunctionNode",),
    "ray.dag.input_node": ("hpcray.graphs.nodes:DAGInputData IN_CONTEXT_MANAGER InputAttributeNode InputNode",),
    "ray.dag.output_node": ("hpcray.graphs.nodes:MultiOutputNode",),
    "ray.dag.py_obj_scanner": ("hpcray.graphs.dag_node:_PyObjScanner _get_node _instances",),
    "ray.dag.utils": ("hpcray.graphs.dag_node:_DAGNodeNameGenerator",),
    "ray.dag.vis_utils": ("hpcray.graphs.dag_node:_DAGNodeNameGenerator _dag_to_dot _get_nodes_and_edges plot",),
    "ray.experimental.compiled_dag_ref": ("hpcray.graphs.compiled_dag_ref:CompiledDAGFuture CompiledDAGRef",),
    # -------------------------------------------------------------------- experimental
    "ray.experimental": ("hpcray.experimental",),
    "ray.experimental.collective": ("hpcray.experimental.collective",),
    "ray.experimental.collective.operations": ("hpcray.experimental.collective",),
    "ray.experimental.internal_kv": ("hpcray.experimental.internal_kv",),
    "ray.experimental.locations": ("hpcray.experimental.locations",),
    "ray.experimental.rdt": (
        "hpcray.experimental:deregister_nixl_memory register_nixl_memory register_nixl_memory_pool "
        "register_tensor_transport set_nixl_cuda_stream set_target_device_for_ref set_target_for_ref wait_tensor_freed",
    ),
    "ray.experimental.state": (),
    "ray.experimental.state.api": ("hpcray.util.state",),
    "ray.experimental.state.common": ("hpcray.state.schemas", "hpcray.state.summaries"),
    "ray.experimental.state.exception": (
        "hpcray.util.state:DataSourceUnavailable RayStateApiException ServerUnavailable",
    ),
    "ray.experimental.tqdm_ray": ("hpcray.experimental.tqdm_ray",),
    # -------------------------------------------------------------------- private names that clients touch
    "ray._common": (),
    "ray._common.constants": (
        f"{_NAMES}.ray_constants:HEAD_NODE_RESOURCE_NAME NODE_ID_PREFIX RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR",
    ),
    "ray._common.filters": (f"{_NAMES}.log:CoreContextFilter",),
    "ray._common.formatters": ("hpcray.platform.log_format:AbstractFormatter JSONFormatter TextFormatter",),
    "ray._common.logging_constants": (f"{_NAMES}.log:LOGGER_FLATTEN_KEYS LOGRECORD_STANDARD_ATTRS LogKey",),
    "ray._common.network_utils": (
        f"{_NAMES}.utils:build_address find_free_port get_all_interfaces_ip get_localhost_ip "
        "get_node_ip_address is_ipv6 is_localhost node_ip_address_from_perspective parse_address",
    ),
    "ray._common.ray_option_utils": (f"{_NAMES}.option_utils",),
    "ray._common.utils": (_UTILS, *_MORE_COMMON_UTILS),
    "ray._common.usage": (),
    "ray._common.usage.usage_lib": (
        f"{_NAMES}.utils:TagKey _TagKey get_extra_usage_tags_to_report get_hardware_usages_to_report "
        "get_library_usages_to_report record_extra_usage_tag record_hardware_usage "
        "record_library_usage usage_stats_enabled",
    ),
    "ray._private": (),
    "ray._private.auto_init_hook": (
        f"{_NAMES}.ray_client:auto_init_lock auto_init_ray enable_auto_connect wrap_auto_init",
    ),
    "ray._private.accelerators": (_ACCELERATORS,),
    **{f"ray._private.accelerators.{name}": (_ACCELERATORS,) for name in _ACCELERATOR_MODULES},
    "ray._private.client_mode_hook": (
        f"{_NAMES}.ray_client:_disable_client_hook _enable_client_hook _explicitly_disable_client_mode "
        "_explicitly_enable_client_mode client_mode_convert_actor client_mode_convert_function client_mode_hook "
        "client_mode_should_convert client_mode_wrap disable_client_hook enable_client_mode is_client_mode_enabled "
        "is_client_mode_enabled_by_default",
    ),
    "ray._private.gc_collect_manager": ("hpcray.runtime.core_worker.threads:PythonGCThread",),
    "ray._private.gcs_utils": (),
    "ray._private.internal_api": (
        f"{_NAMES}.internal_api:get_local_ongoing_lineage_reconstruction_tasks get_memory_info_reply "
        "get_state_from_address global_gc memory_summary",
        "hpcray.internal:Buffer create free",
    ),
    "ray._private.log": (f"{_NAMES}.log:{_LOG}",),
    "ray._private.ray_constants": (_CONSTANTS, _MORE_CONSTANTS, *_LOG_CONSTANTS),
    "ray._private.ray_logging": (f"{_NAMES}.log:NUMBERS setup_logger",),
    "ray._private.ray_logging.logging_config": ("hpcray.api.driver_job:LoggingConfig",),
    "ray._private.runtime_env": (),
    "ray._private.runtime_env.context": ("hpcray.runtime_env.runtime_env_plugin:RuntimeEnvContext",),
    "ray._private.runtime_env.plugin": (
        "hpcray.runtime_env.runtime_env_plugin:RuntimeEnvContext RuntimeEnvPlugin RuntimeEnvPluginManager",
    ),
    "ray._private.runtime_env.validation": (
        f"{_NAMES}.option_utils:parse_and_validate_conda parse_and_validate_env_vars "
        "parse_and_validate_excludes parse_and_validate_pip "
        "parse_and_validate_py_modules parse_and_validate_uv "
        "parse_and_validate_working_dir",
    ),
    "ray._private.runtime_env.constants": (
        f"{_NAMES}.ray_constants:RAY_JOB_CONFIG_JSON_ENV_VAR RAY_RUNTIME_ENV_PLUGINS_ENV_VAR",
    ),
    "ray._private.serialization": (f"{_NAMES}.serialization_context:SerializationContext",),
    "ray._private.services": (f"{_NAMES}.utils:find_gcs_addresses get_node_ip_address",),
    "ray._private.state": (f"{_NAMES}.state:{_STATE}",),
    "ray._private.state_api_test_utils": (
        f"{_NAMES}.util:invoke_state_api invoke_state_api_n verify_failed_task wait_for_task_states",
    ),
    "ray._private.utils": (_UTILS, _MORE_PRIVATE_UTILS),
    "ray._private.worker": (f"{_NAMES}.worker", "hpcray"),
    "ray.internal": ("hpcray.internal:Buffer create free",),
}
"""Sources by module of Ray; `()`: a package whose only contents are its submodules."""

ATTRIBUTES: dict[str, dict[str, Any]] = {
    "ray": {"__version__": claimed_version(), "__commit__": "hpcray"},
    "ray.actor": {"_actor_launch_hook": None},
    "ray.remote_function": {"_task_launch_hook": None},
}

_TOP_LEVEL = (
    "__version__ _config ActorClassID ActorID ClientBuilder DynamicObjectRefGenerator FunctionID JobID Language "
    "LoggingConfig NodeID ObjectID ObjectRef ObjectRefGenerator PlacementGroupID SCRIPT_MODE TaskID UniqueID "
    "WORKER_MODE WorkerID actor autoscaler available_resources cancel client cluster_resources get get_actor "
    "get_gpu_ids get_runtime_context init internal is_initialized java_actor_class java_function kill method "
    "nodes put remote shutdown timeline util wait"
)
PUBLIC = {"ray": tuple(_TOP_LEVEL.split())}
"""The names that a module lists as Ray's does, where its sources have others too: `__all__` and `dir`."""

PRESENT = ("ray._raylet",)
"""Modules that are there once `ray` is imported. Their sources are imported at the first use of a name."""

PROGRAMS = {"ray.scripts.scripts": "main"}
"""Modules that scripts run by `python -m`, and the function that is called."""

SETTERS = {
    "ray._private.auto_init_hook.enable_auto_connect": "hpcray.api.session:enable_auto_init",
    "ray.actor._actor_launch_hook": "hpcray.api.scheduling_strategies:set_actor_launch_hook",
    "ray.remote_function._task_launch_hook": "hpcray.api.scheduling_strategies:set_task_launch_hook",
}
"""Names that Ray's libraries and tests set: the function that is called with the new value."""

LIBRARIES = ("air", "data", "llm", "rllib", "serve", "train", "tune", "workflow")
"""Ray's libraries on top of Core. They are pure Python, and a real wheel can lend them (`finder.lend`)."""

HELPERS = frozenset(
    f"ray.{name}"
    for names in (
        "_common.deprecation _common.pydantic_compat _common.ray_constants",
        "_common.runtime_env_package _common.runtime_env_uri _common.serialization _common.signature _common.tls_utils",
        "_common.retry _common.usage.usage_constants",
        "_private.accelerators _private.arrow_serialization _private.async_utils",
        "_private.authentication _private.collections_utils _private.dict _private.event _private.grpc_utils",
        "_private.inspect_util _private.label_utils _private.path_utils _private.protobuf_compat _private.thirdparty",
        "autoscaler._private.cli_logger",
        "core.generated",
        "dag",
        "dashboard.modules.job.pydantic_models dashboard.modules.metrics.dashboards",
        "experimental.channel experimental.compiled_dag_ref experimental.gradio_utils",
        "experimental.shuffle experimental.util",
        "util.common util.iter util.iter_metrics util.lightgbm util.serialization_addons util.tpu util.xgboost",
        "widgets",
    )
    for name in names.split()
)
"""Modules, and packages with all below, that the libraries import and a real wheel lends, but for those of `MODULES`.

They are pure Python and know nothing of Ray's own processes.
"""

OWN_CODE = (
    "ray._common.retry", "ray._private.collections_utils", "ray._private.dict", "ray._private.inspect_util",
    "ray._private.label_utils", "ray._private.path_utils", "ray.experimental.shuffle", "ray.util.iter",
    "ray.util.iter_metrics",
)  # fmt: skip
"""Modules of `HELPERS` that programs import by themselves too: Ray's own code, on the public API or on none."""

LENT_NAMES = {"ray._private.accelerators.TPUAcceleratorManager": "ray._private.accelerators.tpu"}
"""Names of a facade that are in a module of a real wheel."""

_WHY: dict[str, str] = {
    **dict.fromkeys(
        (f"ray.{name}" for name in LIBRARIES),
        "Ray's libraries (Data, Train, Tune, Serve, RLlib, LLM) are no part of hpcray, which is Ray's Core; "
        "docs/ray-compatibility.md says how a real wheel lends them",
    ),
    **dict.fromkeys(
        OWN_CODE,
        "it is Ray's own code, which Ray's wheel lends; hint: python -m hpcray.compat libraries install, or name the "
        "directory of an unpacked wheel in HPCRAY_RAY_LIBRARIES",
    ),
    "ray._private.log_monitor": "raylets pass on what workers print",
    "ray._private.ray_option_utils": "Ray 2.60 does not have it either",
    "ray._private.test_utils": "it belongs to Ray's own tests",
    "ray.core": "the protocol buffers of Ray's own processes",
    "ray.cpp_function": "there are no workers in other languages",
    "ray.cross_language": "there are no workers in other languages",
    "ray.dag": "graphs have no GPU channels; the rest is in ray.dag",
    "ray.dashboard": "there is no HTTP server; hint: `hpcray dashboard`, `hpcray status`, ray.util.state",
    "ray.experimental.rdt": "its transports' own classes; what programs call is there",
    "ray.experimental.channel": "compiled graphs have channels of their own here, and none for GPUs",
    "ray.util.horovod": "Ray 2.60 does not have it either",
    "ray.util.sgd": "Ray 2.60 does not have it either",
    "ray.util.spark": "it starts Ray on Spark; hpcray is started by Slurm or mpirun",
}


def submodules(module: str) -> list[str]:
    """Return the names of the modules directly below a module of Ray."""
    prefix = f"{module}."
    return [name[len(prefix) :] for name in MODULES if name.startswith(prefix) and "." not in name[len(prefix) :]]


def why_missing(full: str) -> str:
    """Return one sentence that explains why hpcray does not have a name or module of Ray."""
    parts = full.split(".")
    for end in range(len(parts), 0, -1):
        if reason := _WHY.get(".".join(parts[:end])):
            return f"hpcray does not have {full}: {reason}"
    return f"hpcray does not have {full} (it serves the names of Ray {RAY_VERSION} listed in docs/ray-compatibility.md)"
