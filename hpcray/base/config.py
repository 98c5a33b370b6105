"""Settings of one node, in one dataclass. Every one can be set by the environment variable `HPCRAY_<NAME>`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

_HINT = "hint: times are in seconds, sizes in bytes, without a unit; yes and no are 1 and 0"
# The variables that are read elsewhere: the session to join, the launcher's socket or file, where sessions are.
_OTHER_VARIABLES = ("ADDRESS", "CONSOLE", "EXIT_FILE", "TMPDIR")
_NEAR = 0.7
_LEAST_CHUNK = 64 << 10
# Settings that users of Ray know by these names, and how many of its units are one of ours.
_RAYS = {
    "memory_usage_threshold": ("RAY_memory_usage_threshold", 1),
    "memory_monitor_period": ("RAY_memory_monitor_refresh_ms", 1000),
    "task_oom_retries": ("RAY_task_oom_retries", 1),
}


@dataclass(frozen=True)
class Config:
    """Times in seconds, sizes in bytes.

    Attributes:
        start_timeout: every rank must be up within this time.
        stop_timeout: processes that have not left on request by then are killed.
        inline_limit: values up to this size travel inside messages; larger ones live in node stores.
        idle_lease_timeout: a lease with nothing to do is given back after this time.
        idle_worker_timeout: a worker above the node's CPU count is ended after this idle time.
        tick: period of a raylet's housekeeping (parent alive, idle workers, requests that wait).
        heartbeat_interval: every node and the head say that often that they live.
        node_timeout: a node that the head has not heard of for this long is dead (`docs/explain/faults.md`).
        head_timeout: a node that has not heard of the head for this long ends itself.
        driver_rank: the rank whose node runs the program.
        lineage_limit: bytes that a process keeps of finished tasks, to run them again when what they returned is lost;
            beyond it the oldest are forgotten. 0: nothing is ever rebuilt.
        object_store_memory: arena size; 0 means 30 % of the memory this node may use.
        huge_pages: of the object store: "auto" (where the system gives them for the asking), "off", or "reserved"
            (those that vm.nr_hugepages has set aside; "auto" where these do not suffice).
        spill_dir: where a node with a full store writes objects; "": a node-local directory for temporary files.
        spill_threshold: share of the store beyond which objects that nobody reads are written there; 0: never.
        spill_timeout: a write there, or a read, that has not moved for this long keeps nobody waiting any longer; 0: it
            may take for ever.
        enable_zero_copy_torch_tensors: whether PyTorch's CPU tensors are read as views of the store. PyTorch knows no
            read-only memory: who writes to one changes it for all who read it.
        record_ref_creation_sites: whether it is noted for every ref where it was created, for `hpcray memory`.
        data_plane: "auto", "ucx" or "mpi".
        transfer_chunk: larger objects travel between nodes in pieces of this size.
        same_host: whether processes of several nodes of one host speak to each other directly, and read objects in each
            other's stores; else all goes through their raylets and over the wires.
        spin: a driver or worker whose answers came quickly of late looks at its sockets for up to so long before it
            sleeps; 0: it sleeps at once.
        bind: whether a rank and its workers are bound to NUMA nodes where the launcher has left that open (a worker to
            the node of its GPUs), and a rank on one NUMA node uses the RDMA adapters of that node.
        require_rdma: whether a job of several nodes without RDMA does not start.
        locality_wait: so long do tasks wait for the node where most bytes of their arguments are, if it is busy; after
            that others with room take what it will not begin soon.
        labels: of this node, as `region=us,rack=12`, for `label_selector`.
        max_workers: most workers of one node; 0 means what `ulimit -u` and memory allow.
        preload: modules, separated by commas, that are imported once per node, before workers are forked.
        prestart: workers forked before they are asked for; -1 means one per CPU.
        log_to_driver: whether prints of workers reach the driver's terminal.
        get_report_after: a driver's `get` that has waited this long tells for what, on stderr; 0: never.
        task_events: how many ended tasks and calls each worker remembers, for `timeline` and `list_tasks`; 0: none.
        worker_start_timeout: a worker that is not up this long after its fork is killed.
        memory_usage_threshold: share of the node's memory beyond which a worker is ended, before the kernel ends any
            process; 0: never. RAY_memory_usage_threshold is read too.
        memory_monitor_period: how often that is looked at; 0: never. (RAY_memory_monitor_refresh_ms)
        memory_limit: bytes that this node's processes may use together; 0: what the machine, cgroup or Slurm allow.
        task_oom_retries: how often a task that may run again does so after its worker was ended for lack of memory;
            -1: always. (RAY_task_oom_retries)
        record: whether the cores write down what they are told, for `hpcray dump` and `hpcray replay`.
        end_time: Unix time at which the job's time limit ends it; 0: what Slurm says.
        drain_margin: a job begins to drain this long before its end, not before three quarters of its time; 0: never.
        drain_timeout: how long a drain may take that a SIGTERM began; well below the site's KillWait.
        drain_signals: "auto", "none", or the signals that begin a drain, such as "USR1,TERM".
        drain_exit_code: exit code of a job that drained with work left to do.
        requeue: whether such a job asks Slurm to run it again: "auto" (when Slurm preempts it), "scontrol" (always, but
            for jobs that were cancelled), or "exit" (never; the exit code is enough where RequeueExit names it).
        checkpoint_dir: where checkpoints go, on a file system that all nodes share; "": by the job's directory.
        journal_dir: a directory, of this job alone, from which its next run brings back names, detached actors and
            values; %j in it is the Slurm job's number. "": none is kept.
    """

    start_timeout: float = 60.0
    stop_timeout: float = 2.0
    inline_limit: int = 100 * 1024
    idle_lease_timeout: float = 0.1
    idle_worker_timeout: float = 10.0
    tick: float = 0.5
    heartbeat_interval: float = 0.5
    node_timeout: float = 4.0
    head_timeout: float = 10.0
    driver_rank: int = 0
    lineage_limit: int = 1 << 30
    object_store_memory: int = 0
    huge_pages: str = "auto"
    spill_dir: str = ""
    spill_threshold: float = 0.8
    spill_timeout: float = 60.0
    enable_zero_copy_torch_tensors: bool = False
    record_ref_creation_sites: bool = False
    data_plane: str = "auto"
    transfer_chunk: int = 4 << 20
    same_host: bool = True
    spin: float = 200e-6
    bind: bool = True
    require_rdma: bool = False
    locality_wait: float = 1.0
    labels: str = ""
    max_workers: int = 0
    preload: str = ""
    prestart: int = -1
    log_to_driver: bool = True
    get_report_after: float = 60.0
    task_events: int = 5_000
    worker_start_timeout: float = 60.0
    memory_usage_threshold: float = 0.95
    memory_monitor_period: float = 0.25
    memory_limit: int = 0
    task_oom_retries: int = -1
    record: bool = False
    end_time: float = 0.0
    drain_margin: float = 60.0
    drain_timeout: float = 20.0
    drain_signals: str = "auto"
    drain_exit_code: int = 75
    requeue: str = "auto"
    checkpoint_dir: str = ""
    journal_dir: str = ""

    @property
    def chunk(self) -> int:
        """Bytes of a piece of a large object on its way: `transfer_chunk`, but nothing tiny."""
        return max(_LEAST_CHUNK, self.transfer_chunk)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **given: Any) -> Config:
        """Defaults, overridden by `HPCRAY_*` variables, overridden by `given` (None means not given).

        Raises:
            ValueError: a variable or a given value is not valid; the message names it.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for field in fields(cls):
            text = environ.get("HPCRAY_" + field.name.upper())
            if text is not None:
                value = _parse(field.name, text, type(field.default))
                values[field.name] = _check(f"HPCRAY_{field.name.upper()}", value, field.default)
            elif field.name in _RAYS and (text := environ.get(_RAYS[field.name][0])) is not None:
                values[field.name] = _parse_rays(*_RAYS[field.name], text, field.default)
        defaults = asdict(cls())
        values.update({n: _check(n, value, defaults.get(n)) for n, value in given.items() if value is not None})
        return _check_beats(cls(**values))

    @classmethod
    def unknown_variables(cls, environ: Mapping[str, str]) -> list[str]:
        """One sentence for every variable that looks like a mistyped one of ours; users may have others."""
        from difflib import get_close_matches

        known = [*(field.name.upper() for field in fields(cls)), *_OTHER_VARIABLES]
        names = sorted(name.removeprefix("HPCRAY_") for name in environ if name.startswith("HPCRAY_"))
        return [
            f"HPCRAY_{name} is no setting and has no effect; hint: HPCRAY_{near[0]}?"
            for name in names
            if name not in known and (near := get_close_matches(name, known, 1, _NEAR))
        ]

    def as_dict(self) -> dict[str, Any]:
        """All settings, for a message."""
        return dict(vars(self))  # each worker gets it: `asdict` copies every value, which takes half a millisecond


def _check_beats(config: Config) -> Config:
    """Heartbeats must come often enough for one or two to be late."""
    beat, least = config.heartbeat_interval, min(config.node_timeout, config.head_timeout)
    if not 0.0 < 3.0 * beat <= least:
        raise ValueError(
            f"heartbeat_interval={beat:g} s must be more than 0 and go three times into node_timeout="
            f"{config.node_timeout:g} s and head_timeout={config.head_timeout:g} s; hint: HPCRAY_HEARTBEAT_INTERVAL"
        )
    return config


def _parse(name: str, text: str, kind: type) -> Any:
    try:
        if kind is bool:
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"HPCRAY_{name.upper()}={text!r} is not a valid {kind.__name__}; {_HINT}") from None


def _parse_rays(variable: str, units: int, text: str, default: Any) -> Any:
    kind = type(default)
    try:
        value = kind(text) if units == 1 else kind(float(text) / units)
    except ValueError:
        raise ValueError(f"{variable}={text!r} is not a valid {kind.__name__}") from None
    return _check(variable, value, default)


def _check(name: str, value: Any, default: Any) -> Any:
    """`value` if it is of the kind of `default`, and not negative unless that is."""
    kind = type(default)
    number = kind in (int, float)
    fits = isinstance(value, (int, kind) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    if not fits or (number and not min(0, default) <= value < float("inf")):
        hint = _HINT if number else f"hint: the default is {default!r}"
        raise ValueError(f"{name}={value!r} is not a valid {kind.__name__}; {hint}")
    return value
