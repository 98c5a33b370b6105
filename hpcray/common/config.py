"""Settings of one node, in one struct. The environment variable `HPCRAY_<NAME>` sets the field of that name; so does
the key `<name>` of a configuration file (`platform/config_files.py`)."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec

# ------------------------------------------------------------ sizes
# Sizes in bytes as people write them: the same spellings in every option and variable.


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes in a size such as `512m`, `2g`, `1.5GiB`, `1000000` or `1e9`; units are powers of 1024, as in Slurm.

    Raises:
        ValueError: `text` is not a positive size.
    """
    match = _SIZE.fullmatch(text.strip())
    size = math.floor(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if size <= 0:
        raise ValueError(f"{text!r} is not a size; hint: write 2g, 512m or a number of bytes")
    return size


def format_setting(size: int) -> str:
    """A size as a setting has it: `2g`, `100k`, `1000001`; `parse_size` reads it back."""
    unit = next((unit for unit in reversed(_UNITS) if size and size % _UNITS[unit] == 0), "")
    return f"{size // _UNITS[unit]}{unit}"


# ------------------------------------------------------------ config


Seconds = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
Share = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
Bytes = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
CountOrMinusOne = Annotated[int, msgspec.Meta(ge=-1)]

_T = TypeVar("_T")
PREFIX = "HPCRAY_"
"""Beginning of the variable of a setting; the name in upper case follows."""
_HINT = "hint: times are in seconds, sizes in bytes or as 2g, 512m; yes and no are 1 and 0"
# Read by other modules: the session to join, the launcher's socket and file, the parent of session directories.
_OTHER_VARIABLES = (
    "ACCOUNT", "ADDRESS", "ATTACH_COMMAND", "ATTACH_DIR", "ATTACH_WAIT", "CONFIG", "CONSOLE", "CONSTRAINT",
    "EXECUTOR", "EXIT_FILE", "HEAD_WAIT", "INSTANCE_ID", "JOBS", "JOIN_WAIT", "LAUNCHER", "MADE_UP_GPUS", "MPIRUN",
    "NAMESPACE", "NETWORK_DEVICES", "NODE_ID", "NODE_NAME", "OUTLIVES_STARTER", "PARTITION", "RAY_API",
    "RAY_LIBRARIES", "RAY_VERSION", "SAFE_DIRECTORIES", "SERVE_TOKEN", "SESSION", "SHARE_GPUS", "START_BELL",
    "START_DIR", "START_GUARD", "TERMINAL", "TMPDIR",
)  # fmt: skip
RAY_LIBRARIES = "HPCRAY_RAY_LIBRARIES"
"""Variable of a driver, which its workers get too: where `import ray` finds Ray's own libraries."""
OTLP_FILE = "otlp-file:"
"""First part of a value of the setting `trace`."""
REMOVED_SETTINGS = {
    "learn_imports": "no module is imported ahead of workers but what preload names; hint: HPCRAY_PRELOAD",
}
"""Settings of earlier versions, and what to do instead."""
_SIMILARITY = 0.7  # of a mistyped variable to the right one, from 0 to 1
_TAKEN_CODES, _LAST_CODE = (0, 1, 2, 75, 124), 125
_MIN_CHUNK = 64 << 10  # bytes
# Ray's settings, read from RAY_<name> and from init(_system_config=): our field, and how many of Ray's units are one of
# ours. All others of Ray's are internals of its processes.
_RAY_SETTINGS = {
    "memory_usage_threshold": ("memory_usage_threshold", 1),
    "memory_monitor_refresh_ms": ("memory_monitor_period", 1000),
    "task_oom_retries": ("task_oom_retries", 1),
    "actor_graceful_shutdown_timeout_ms": ("actor_graceful_shutdown_timeout", 1000),
    "local_gc_interval_s": ("gc_interval", 1),
    "local_gc_min_interval_s": ("gc_min_interval", 1),
    "global_gc_min_interval_s": ("global_gc_min_interval", 1),
    "object_spilling_threshold": ("spill_threshold", 1),
    "local_fs_capacity_threshold": ("disk_capacity_threshold", 1),
    "max_direct_call_object_size": ("inline_limit", 1),
    "maximum_gcs_destroyed_actor_cached_count": ("dead_actors", 1),
    "max_lineage_bytes": ("lineage_limit", 1),
    "max_num_generator_returns": ("max_generator_returns", 1),
    "preload_python_modules": ("preload", 1),
    "record_ref_creation_sites": ("record_ref_creation_sites", 1),
    "scheduler_spread_threshold": ("spread_threshold", 1),
    "worker_lease_timeout_milliseconds": ("idle_lease_timeout", 1000),
    "idle_worker_killing_time_threshold_ms": ("idle_worker_timeout", 1000),
    "worker_cap_initial_backoff_delay_ms": ("worker_cap_initial_backoff", 1000),
    "worker_cap_max_backoff_delay_ms": ("worker_cap_max_backoff", 1000),
}
RAY_VARIABLES = {field: f"RAY_{name}" for name, (field, _) in _RAY_SETTINGS.items()}
"""Ray's variable for a setting, by the name of our field."""


OF_ONE_NODE = frozenset(
    {
        "bind", "disk_capacity_threshold", "elastic", "end_note", "end_time", "huge_pages", "journal_dir", "labels",
        "max_workers", "memory_limit", "object_store_memory", "preload", "prestart", "require_rdma", "same_host",
        "spill_dir", "start_timeout",
    }
)  # fmt: skip
"""Settings that a node which joins a running job has for itself; all others are the job's."""


class Config(msgspec.Struct, frozen=True):
    """Times in seconds, sizes in bytes.

    Attributes:
        start_timeout: every rank must be up within this time.
        stop_timeout: processes that have not left on request by then are killed.
        inline_limit: values up to this size travel inside messages; larger ones are kept in object stores.
        max_generator_returns: a generator that yields more values fails; their ids have room for 16 million.
        idle_lease_timeout: a lease without work is returned after this time.
        idle_worker_timeout: a worker above the node's CPU count is ended after this idle time, unless it owns objects.
        worker_cap_initial_backoff: where as many tasks of a kind as the node has CPUs for are blocked in `get`, one
            more starts after this time, the next after twice as long; 0: all start at once.
        worker_cap_max_backoff: the longest such wait.
        tick: period of a raylet's housekeeping (parent alive, idle workers, requests that wait).
        heartbeat_interval: period of the heartbeats of every node and of the head.
        node_timeout: a node without a heartbeat for this long is dead to the head (`docs/explain/faults.md`).
        head_timeout: a node that gets no heartbeat of the head for this long ends itself.
        driver_rank: the rank whose node runs the program.
        lineage_limit: bytes that a process keeps of finished tasks, to run them again when what they returned is lost;
            beyond it the oldest are forgotten. 0: nothing is ever rebuilt.
        object_store_memory: arena size; 0 means 30 % of the memory this node may use.
        huge_pages: of the object store: "auto" (as far as the system grants them), "off", or "reserved"
            (those that vm.nr_hugepages has set aside; "auto" where these do not suffice).
        spill_dir: directory to which a node with a full store writes objects; "": a node-local directory for temporary
            files.
        spill_threshold: share of the store beyond which objects without readers are written there; 0: never.
        spill_timeout: after this time without progress of a write there, or a read, no request waits for it; 0: no
            limit.
        disk_capacity_threshold: share of that disk beyond which nothing more is written there; 0: no limit.
        enable_zero_copy_torch_tensors: whether PyTorch's CPU tensors are read as views of the store. PyTorch has no
            read-only memory: a write to such a tensor changes it for all readers.
        unused_tensor_memory: memory of tensors that a process has read and dropped is kept for a second, for the next
            ones of the same size: at most this, and an eighth of the node's memory; 0: none.
        registered_memory: a process that uses a GPU registers parts of the object store with its driver (pinned
            memory), for copies at full speed: at most this, and an eighth of the node's memory; 0: none.
        device_object_memory: a process keeps device objects of at most so many bytes on each device; those used least
            recently move to the object store, and come back when they are used; 0: no limit, and they never move.
        device_transports: UCX transports by which tensors pass from a GPU to one of another host: "auto" (GPUDirect
            over RDMA, where both hosts have it), "none" (they pass through the hosts), or those named, as in UCX_TLS.
        record_ref_creation_sites: whether every ref records where it was created, for `hpcray memory`.
        data_plane: "auto", "ucx" or "mpi".
        transfer_chunk: larger objects travel between nodes in pieces of this size.
        same_host: whether processes of several nodes on one host are connected directly, and read objects in each
            other's
            stores; else all data goes through their raylets and the network.
        spin: a driver or worker with quick recent replies polls its sockets for up to this long before it sleeps; 0:
            no polling.
        bind: whether a rank and its workers are bound to NUMA nodes where the launcher has left that open (a worker to
            the node of its GPUs), and a rank on one NUMA node uses the RDMA adapters of that node.
        require_rdma: whether a job of several nodes without RDMA does not start.
        elastic: whether UCX can reach other hosts although all nodes of the job start on one: nodes of other hosts may
            join later.
        min_nodes: the job is to have so many nodes; the autoscaler starts those that it does not begin with.
        max_nodes: most nodes that the autoscaler lets the job have; 0: there is no autoscaler.
        node_types: kinds of nodes that it may start, as JSON (`docs/how-to/elastic.md`); "": nodes like the first one.
        idle_node_timeout: a node that it has started, and that does nothing for this long, is given back.
        upscaling_speed: how many nodes may be on their way at a time, as a multiple of those that there are; always 5.
        node_provider: where they come from: "slurm", "local" (processes of the head's machine), or "auto".
        locality_wait: how long tasks wait for the node with most bytes of their arguments, if it is busy; after that,
            other nodes take those that it will not begin soon.
        spread_threshold: share of a node's resources up to which tasks stay where they are submitted, and the head
            packs tasks and actors there; then it takes the least used node. (RAY_scheduler_spread_threshold)
        labels: of this node, as `region=us,rack=12`, for `label_selector`.
        end_note: text behind the reason of the end of this node where no request has ended it, as it is: the starter of
            a node may know what ends such nodes, and what helps.
        topology: a file that says which nodes share a switch or a block, in the form of Slurm's topology.conf or
            topology.yaml; "": what the batch system says (`docs/how-to/topology.md`).
        rack_pattern: a regular expression that finds the rack in the name of a host, such as `(r[0-9]+)`; "": none.
        max_workers: maximum number of workers of one node; 0: what `ulimit -u` and memory allow.
        extensions: extensions of programs, as `name=module:Class`, separated by commas (docs/how-to/extensions.md).
        preload: modules, separated by commas, that are imported once per node, before workers are forked.
        prestart: workers forked before the first request; -1: one per CPU.
        log_to_driver: whether prints of workers reach the driver's terminal.
        get_report_after: a driver's `get` that has waited this long reports its reason on stderr; 0: never.
        dead_actors: how many actors that have ended `list_actors` knows.
        task_events: how many ended tasks and calls each worker remembers, for `timeline` and `list_tasks`; 0: none.
        worker_start_timeout: a worker that is not up this long after its fork is killed.
        memory_usage_threshold: share of the node's memory beyond which a worker is ended, before the kernel ends any
            process; 0: never. RAY_memory_usage_threshold is read too.
        memory_monitor_period: period of that check; 0: never. (RAY_memory_monitor_refresh_ms)
        memory_limit: bytes that this node's processes may use together; 0: what the machine, cgroup or Slurm allow.
        task_oom_retries: how often a task that may run again does so after its worker was ended for lack of memory;
            -1: without limit, unless nothing else ran there that could have made room, ten times.
            (RAY_task_oom_retries)
        actor_graceful_shutdown_timeout: an actor that ends on purpose is killed if its `__ray_shutdown__`, its exit
            handlers and the tasks that it has submitted take longer. (RAY_actor_graceful_shutdown_timeout_ms)
        gc_interval: each process collects cyclic garbage at least so often: Python's own collector may be switched off,
            and does not know what memory a ref or an actor handle in a cycle holds.
        gc_min_interval: and at most so often, where the objects of its node do not fit into memory.
        global_gc_min_interval: all processes of the job do so at most so often, where objects do not fit or requests
            wait for resources.
        record: whether the cores record their inputs, for `hpcray dump` and `hpcray replay`.
        end_time: Unix time at which the job's time limit ends it; 0: Slurm's.
        drain_margin: a job begins to drain this long before its end, not before three quarters of its time; 0: never.
        drain_timeout: how long a drain may take that a SIGTERM began; well below the site's KillWait.
        drain_signals: "auto", "none", or the signals that begin a drain, such as "USR1,TERM".
        drain_exit_code: exit code of a job that drained with work left to do.
        requeue: whether such a job asks Slurm to run it again: "auto" (when Slurm preempts it), "scontrol" (always,
            except for cancelled jobs), or "exit" (never; the exit code is enough where RequeueExit names it).
        checkpoint_dir: where checkpoints go, on a file system that all nodes share; "": by the job's directory.
        journal_dir: a directory, of this job alone, from which its next run brings back names, detached actors and
            values; %j in it is the Slurm job's number. "": none is kept.
        durable_dir: the directory of results that outlive their job, one for all jobs (`docs/how-to/durable.md`); "":
            `$XDG_STATE_HOME/hpcray/durable`, or `~/.local/state/hpcray/durable`.
        durable_verify: share of the results found there that is computed again all the same, to compare.
        durable_size: size that this directory may reach; jobs that begin remove the oldest results. 0: any.
        durable_timeout: where the directory has not answered for this long, the job goes on without it.
        durable_dry_run: whether durable tasks whose results are not kept are left out, to count them.
        log_dir: a directory, %j in it is the Slurm job's number, where the log files of the workers of node 3 are in
            `node-3`, and stay; "": they are in the session directory, and go with it.
        history: whether each node writes what happens in the job to a file, for `hpcray jobs`, `why`, `summary` and
            `report` to read when the job has ended (`docs/how-to/after-the-end.md`).
        history_dir: the directory of these files, on a file system that all nodes share; "": `hpcray` in
            $XDG_STATE_HOME, or in `~/.local/state`.
        history_size: bytes that they take for one job, on all nodes together; what is oldest goes first.
        report: a directory into which the report on the job is written at its end (`hpcray report`); "": none is.
        end_hangs: waits that can never end get a HangError, and a job in which nothing has gone on for this long ends,
            unless it waits for something outside (`docs/how-to/hangs.md`); 0: neither.
        hang_exit_code: exit code of a job that ended so. Not one that the site's RequeueExit names.
        metrics_export: "socket": a process of each node serves the node's metrics on `metrics.s` in its session
            directory; a directory: it also writes them there every 15 s, for node_exporter's textfile collector; "":
            only what the program measures is served.
        trace: "otlp-file:DIRECTORY": OpenTelemetry's spans of all calls and their execution go to files in it, one for
            each process, %j in it is the Slurm job's number (`docs/how-to/metrics.md`); "": there are none.
    """

    start_timeout: Seconds = 60.0
    stop_timeout: Seconds = 2.0
    inline_limit: Bytes = 100 * 1024
    max_generator_returns: Annotated[int, msgspec.Meta(ge=1, le=16_000_000)] = 16_000_000
    idle_lease_timeout: Seconds = 0.1
    idle_worker_timeout: Seconds = 1.0
    worker_cap_initial_backoff: Seconds = 1.0
    worker_cap_max_backoff: Seconds = 10.0
    tick: Seconds = 0.5
    heartbeat_interval: Seconds = 0.5
    node_timeout: Seconds = 4.0
    head_timeout: Seconds = 10.0
    driver_rank: Count = 0
    lineage_limit: Bytes = 1 << 30
    object_store_memory: Bytes = 0
    huge_pages: str = "auto"
    spill_dir: str = ""
    spill_threshold: Share = 0.8
    spill_timeout: Seconds = 60.0
    disk_capacity_threshold: Share = 0.95
    enable_zero_copy_torch_tensors: bool = False
    unused_tensor_memory: Bytes = 4 << 30
    registered_memory: Bytes = 8 << 30
    device_object_memory: Bytes = 0
    device_transports: str = "auto"
    record_ref_creation_sites: bool = False
    data_plane: str = "auto"
    transfer_chunk: Bytes = 4 << 20
    same_host: bool = True
    spin: Seconds = 200e-6
    bind: bool = True
    require_rdma: bool = False
    elastic: bool = False
    min_nodes: Count = 0
    max_nodes: Count = 0
    node_types: str = ""
    idle_node_timeout: Seconds = 300.0
    upscaling_speed: Share = 1.0
    node_provider: str = "auto"
    locality_wait: Seconds = 1.0
    spread_threshold: Share = 0.5
    labels: str = ""
    end_note: str = ""
    topology: str = ""
    rack_pattern: str = ""
    max_workers: Count = 0
    extensions: str = ""
    preload: str = ""
    prestart: CountOrMinusOne = -1
    log_to_driver: bool = True
    get_report_after: Seconds = 60.0
    dead_actors: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    task_events: Count = 5_000
    worker_start_timeout: Seconds = 60.0
    memory_usage_threshold: Share = 0.95
    memory_monitor_period: Seconds = 0.25
    memory_limit: Bytes = 0
    task_oom_retries: CountOrMinusOne = -1
    actor_graceful_shutdown_timeout: Seconds = 30.0
    gc_interval: Seconds = 5400.0
    gc_min_interval: Seconds = 10.0
    global_gc_min_interval: Seconds = 10.0
    record: bool = False
    end_time: Seconds = 0.0
    drain_margin: Seconds = 60.0
    drain_timeout: Seconds = 20.0
    drain_signals: str = "auto"
    drain_exit_code: Count = 75
    requeue: str = "auto"
    checkpoint_dir: str = ""
    journal_dir: str = ""
    durable_dir: str = ""
    durable_verify: Share = 0.0
    durable_size: Bytes = 0
    durable_timeout: Seconds = 10.0
    durable_dry_run: bool = False
    log_dir: str = ""
    history: bool = True
    history_dir: str = ""
    history_size: Bytes = 256 << 20
    report: str = ""
    end_hangs: Seconds = 0.0
    hang_exit_code: Count = 79
    metrics_export: str = ""
    trace: str = ""

    @property
    def chunk(self) -> int:
        """Bytes of a piece of a large object on its way: `transfer_chunk`, but nothing tiny."""
        return max(_MIN_CHUNK, self.transfer_chunk)

    @classmethod
    def from_env(cls, environ: Mapping[str, str], **given: Any) -> Config:
        """Defaults, overridden by `HPCRAY_*` variables, overridden by `given` (None means not given).

        Raises:
            ValueError: a variable or a given value is not valid; the message names it.
        """
        texts: dict[str, str] = {}
        variables: dict[str, str] = {}
        for name, (field, units) in _RAY_SETTINGS.items():
            if (text := environ.get(ray_name := "RAY_" + name)) is not None:
                texts[field], variables[field] = _in_our_units(text, units), ray_name
        for field in cls.__struct_fields__:
            if (text := environ.get(name := "HPCRAY_" + field.upper())) is not None:
                texts[field], variables[field] = text, name
        for field in SIZES & texts.keys():
            texts[field] = _in_bytes(texts[field])
        overrides = {field: value for field, value in given.items() if value is not None}
        sources = {field: f"{name}={environ[name]!r}" for field, name in variables.items()}
        values = {**convert(cls, texts, sources, strict=False), **convert(cls, overrides, {}, strict=True)}
        return _check_trace(_check_hang_exit_code(_check_heartbeats(cls(**values))))

    @staticmethod
    def from_system_config(ray_settings: Mapping[str, Any]) -> dict[str, Any]:
        """Our settings, by field, in what a program of Ray's gives as `_system_config`; the rest has no effect.

        Of several directories for spilled objects the first one is used.
        """
        found: dict[str, Any] = {}
        for name, value in ray_settings.items():
            field, units = _RAY_SETTINGS.get(name, ("", 1))
            if isinstance(value, list):
                value = ",".join(value)
            if field:
                found[field] = value if units == 1 else value / units
        if ray_settings.get("worker_cap_enabled") is False:
            found["worker_cap_initial_backoff"] = 0.0
        if ray_settings.get("lineage_pinning_enabled") is False:
            found["lineage_limit"] = 0
        if ray_settings.get("automatic_object_spilling_enabled") is False:
            found["spill_threshold"] = 0.0
        if spilling := ray_settings.get("object_spilling_config"):
            params = json.loads(spilling).get("params", {})
            directories = params.get("directory_path") or []
            if directories:
                found["spill_dir"] = directories if isinstance(directories, str) else directories[0]
        return found

    @classmethod
    def unknown_variables(cls, environ: Mapping[str, str]) -> list[str]:
        """One sentence for every variable that was a setting, or looks like a mistyped one; users may have others."""
        from difflib import get_close_matches

        known = [*map(str.upper, cls.__struct_fields__), *_OTHER_VARIABLES]
        names = sorted(name.removeprefix("HPCRAY_") for name in environ if name.startswith("HPCRAY_"))
        removed = [name for name in names if name.lower() in REMOVED_SETTINGS]
        return [
            f"HPCRAY_{name} is no setting any more and has no effect: {REMOVED_SETTINGS[name.lower()]}"
            for name in removed
        ] + [
            f"HPCRAY_{name} is no setting and has no effect; hint: HPCRAY_{near[0]}?"
            for name in names
            if name not in [*known, *removed] and (near := get_close_matches(name, known, 1, _SIMILARITY))
        ]

    def in_job(self, settings: Mapping[str, Any]) -> Config:
        """The settings of a node that joins a running job: the job's, but for those of one node (`OF_ONE_NODE`).

        Args:
            settings: the job's, as `as_dict` returns them.
        """
        known = set(self.__struct_fields__) - OF_ONE_NODE
        return msgspec.structs.replace(self, **{name: value for name, value in settings.items() if name in known})

    def as_dict(self) -> dict[str, Any]:
        """All settings, for a message."""
        return msgspec.structs.asdict(self)


SIZES = frozenset(field for field, kind in Config.__annotations__.items() if kind == "Bytes")
"""Settings that are sizes; they may be given as text such as `2g`."""


def _in_bytes(text: str) -> str:
    """A size such as `2g` as a number of bytes; text that is no size stays as it is."""
    with contextlib.suppress(ValueError):
        return str(parse_size(text))
    return text


def _in_our_units(text: str, units: int) -> str:
    """The value of a variable of Ray's in the unit of our setting; text that is no number stays as it is."""
    try:
        return text if units == 1 else repr(float(text) / units)
    except ValueError:
        return text


def convert(config: type[_T], values: Mapping[str, Any], sources: Mapping[str, str], *, strict: bool) -> dict[str, Any]:
    """Values of settings, each checked against the type of its field.

    Args:
        config: `Config` or `LaunchConfig`.
        values: by name of the field.
        sources: what an error shows of a field, as `NAME='text'`; without one it shows the field and the value.
        strict: whether text for a number or a boolean is refused.

    Raises:
        ValueError: a value is not valid; the message names it.
    """
    if not values:
        return {}  # msgspec reads all annotations of a class that it converts to for the first time
    # A float of NumPy's is a float, but msgspec takes it for another type.
    plain = {field: float(value) if isinstance(value, float) else value for field, value in values.items()}
    try:
        made = msgspec.convert(plain, config, strict=strict)
    except msgspec.ValidationError as error:
        field = str(error).rpartition("$.")[2].rstrip("`")
        kind = type(getattr(config(), field))
        hint = _HINT if kind is not str else f"hint: {_what_is_valid(config, field)}"
        source = sources.get(field, f"{field}={values[field]!r}")
        raise ValueError(f"{source} is not a valid {kind.__name__}; {hint}") from None
    return {field: getattr(made, field, value) for field, value in values.items()}


def _what_is_valid(config: type[Any], field: str) -> str:
    """Hint for a setting that is text: its values where there are few, else its default."""
    choices = get_args(get_type_hints(config)[field])
    return f"one of {', '.join(choices)}" if choices else f"the default is {getattr(config(), field)!r}"


def _check_heartbeats(config: Config) -> Config:
    """Refuse intervals that leave no room for one or two late heartbeats."""
    beat, least = config.heartbeat_interval, min(config.node_timeout, config.head_timeout)
    if not 0.0 < 3.0 * beat <= least:
        raise ValueError(
            f"heartbeat_interval={beat:g} s must be more than 0 and go three times into node_timeout="
            f"{config.node_timeout:g} s and head_timeout={config.head_timeout:g} s; hint: HPCRAY_HEARTBEAT_INTERVAL"
        )
    return config


def _check_hang_exit_code(config: Config) -> Config:
    """Refuse codes that mean something else to shells, to `timeout`, or to hpcray itself."""
    code = config.hang_exit_code
    if code in _TAKEN_CODES or code > _LAST_CODE:
        raise ValueError(
            f"hang_exit_code={code} has another meaning: it may be none of {', '.join(map(str, _TAKEN_CODES))}, and no "
            f"more than {_LAST_CODE}; hint: HPCRAY_HANG_EXIT_CODE=79"
        )
    return config


def _check_trace(config: Config) -> Config:
    """Refuse a destination of spans that is no directory of files."""
    if config.trace and config.trace.removeprefix(OTLP_FILE) in ("", config.trace):
        raise ValueError(f"trace={config.trace!r} names no directory; hint: HPCRAY_TRACE={OTLP_FILE}DIRECTORY")
    return config


# ------------------------------------------------------------ launch config
# Settings of the commands that start and submit jobs, and of a node's place; in one struct, read like `Config`.


LauncherName = Literal["auto", "srun", "openmpi", "mpich", "intelmpi", "pals", "flux"]
"""Launcher of the nodes of a job."""
ExecutorName = Literal["auto", "slurm", "pbs", "flux", "local"]
"""Place of submitted jobs."""


class LaunchConfig(msgspec.Struct, frozen=True):
    """Text, most of it; "" where the site and the user say nothing.

    Attributes:
        launcher: what `hpcray-launch` starts nodes with, as its `--launcher`. "srun" and "flux" count only inside a job
            of Slurm or Flux, and nothing does where the command line names hosts or an mpirun.
        mpirun: the mpirun or mpiexec to use: a path, or a name on PATH; "": the one beside this Python, or on PATH.
        executor: where `submit` and `nodes add` run jobs, as their `--executor`.
        partition: of the jobs that they submit, where these name none.
        account: of these jobs, likewise.
        constraint: of these jobs, likewise: features that nodes must have.
        jobs: folder of submitted jobs, on a file system that all nodes share; "": `.hpcray-jobs` in the working
            directory.
        tmpdir: node-local directory, with a short path, for session directories and other temporary files; "": the
            batch system's, else the system's.
        start_dir: the directory of the secrets of clusters that `ray start` makes, of the user alone, on a file system
            that all nodes see; "": `clusters` in `~/.hpcray`.
        start_bell: whether the head of such a cluster lets scripts test the port that `--port` gives; it says nothing
            there.
        start_guard: whether `ray start` without `--block` starts a step of Slurm's, of one idle process, that removes
            the files of its node if all of it is killed, as by cgroups at the end of its step.
        head_wait: seconds that `ray start --address` waits for its head.
        join_wait: seconds that `init()` waits for a node that `ray start` was called for.
        safe_directories: directories of other users that this user trusts, separated by ":": session directories and
            secrets may lie below them. Those of root and the user's own need no mention.
        network_devices: network devices for MPI and UCX, as `UCX_NET_DEVICES`, which comes first where it is set; "":
            those of the rank's NUMA node, or those that UCX chooses.
        ray_api: whether `hpcray dashboard` serves Ray's REST API for jobs too, as with its `--ray-api`, and `ray start
            --head` beside its node.
        attach_wait: seconds for which a job keeps what a driver outside of it owns while the line to it is broken.
        attach_command: hpcray's command on the login node that `init("ssh://HOST/JOBID")` goes through; "": `hpcray` on
            a login shell's PATH.
        attach_dir: directory of this host for the objects that such a driver reads and writes; "": the temporary one.
    """

    launcher: LauncherName = "auto"
    mpirun: str = ""
    executor: ExecutorName = "auto"
    partition: str = ""
    account: str = ""
    constraint: str = ""
    jobs: str = ""
    tmpdir: str = ""
    start_dir: str = ""
    start_bell: bool = True
    start_guard: bool = True
    head_wait: float = 300.0
    join_wait: float = 30.0
    safe_directories: str = ""
    network_devices: str = ""
    attach_wait: float = 300.0
    attach_command: str = ""
    attach_dir: str = ""
    ray_api: bool = False

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> LaunchConfig:
        """Defaults, overridden by `HPCRAY_*` variables; an empty variable counts as none.

        Raises:
            ValueError: a variable is not valid; the message names it.
        """
        names = {field: PREFIX + field.upper() for field in cls.__struct_fields__}
        texts = {field: environ[name] for field, name in names.items() if environ.get(name)}
        sources = {field: f"{names[field]}={text!r}" for field, text in texts.items()}
        return cls(**convert(cls, texts, sources, strict=False))
