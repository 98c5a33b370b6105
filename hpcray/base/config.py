"""Settings of one node, in one dataclass. Every one can be set by the environment variable `HPCRAY_<NAME>`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any

_HINT = "hint: times are in seconds, sizes in bytes, without a unit; yes and no are 1 and 0"
# The variables that are read elsewhere: the session to join, the launcher's socket, where session directories go.
_OTHER_VARIABLES = ("ADDRESS", "CONSOLE", "TMPDIR")
_NEAR = 0.7


@dataclass(frozen=True)
class Config:
    """Times in seconds, sizes in bytes.

    Attributes:
        start_timeout: every rank must be up within this time.
        stop_timeout: processes that have not left on request by then are killed.
        inline_limit: values up to this size travel inside messages; larger ones live in node stores.
        idle_lease_timeout: a lease with nothing to do is given back after this time.
        idle_worker_timeout: a worker above the node's CPU count is ended after this idle time.
        tick: period of a raylet's housekeeping (parent alive, heartbeats).
        heartbeat_timeout: a raylet not heard of for this long is dead.
        object_store_memory: arena size; 0 means 30 % of the memory this node may use.
        spill_dir: where a node with a full store writes objects; "": a node-local directory for temporary files.
        spill_threshold: share of the store beyond which objects that nobody reads are written there; 0: never.
        enable_zero_copy_torch_tensors: whether PyTorch's CPU tensors are read as views of the store. PyTorch knows no
            read-only memory: who writes to one changes it for all who read it.
        record_ref_creation_sites: whether it is noted for every ref where it was created, for `hpcray memory`.
        data_plane: "auto", "ucx" or "mpi".
        require_rdma: whether a job of several nodes without RDMA does not start.
        max_workers: most workers of one node; 0 means what `ulimit -u` and memory allow.
        preload: modules, separated by commas, that are imported once per node, before workers are forked.
        prestart: workers forked before they are asked for; -1 means one per CPU.
        log_to_driver: whether prints of workers reach the driver's terminal.
        end_time: Unix time at which the job's time limit ends it; 0: what Slurm says.
        drain_margin: a job begins to drain this long before its end, not before three quarters of its time; 0: never.
        drain_timeout: how long a drain may take that a SIGTERM began; well below the site's KillWait.
        drain_signals: "auto", "none", or the signals that begin a drain, such as "USR1,TERM".
        drain_exit_code: exit code of a job that drained with work left to do.
        requeue: whether such a job asks Slurm to run it again: "auto" (when Slurm preempts it), "scontrol" (always, but
            for jobs that were cancelled), or "exit" (never; the exit code is enough where RequeueExit names it).
        checkpoint_dir: where checkpoints go, on a file system that all nodes share; "": by the job's directory.
    """

    start_timeout: float = 60.0
    stop_timeout: float = 2.0
    inline_limit: int = 100 * 1024
    idle_lease_timeout: float = 0.1
    idle_worker_timeout: float = 10.0
    tick: float = 0.5
    heartbeat_timeout: float = 30.0
    object_store_memory: int = 0
    spill_dir: str = ""
    spill_threshold: float = 0.8
    enable_zero_copy_torch_tensors: bool = False
    record_ref_creation_sites: bool = False
    data_plane: str = "auto"
    require_rdma: bool = False
    max_workers: int = 0
    preload: str = ""
    prestart: int = -1
    log_to_driver: bool = True
    end_time: float = 0.0
    drain_margin: float = 60.0
    drain_timeout: float = 20.0
    drain_signals: str = "auto"
    drain_exit_code: int = 75
    requeue: str = "auto"
    checkpoint_dir: str = ""

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
        defaults = asdict(cls())
        values.update({n: _check(n, value, defaults.get(n)) for n, value in given.items() if value is not None})
        return cls(**values)

    @classmethod
    def unknown_variables(cls, environ: Mapping[str, str]) -> list[str]:
        """One sentence for every variable that looks like a mistyped one of ours; users may have others."""
        known = [*(field.name.upper() for field in fields(cls)), *_OTHER_VARIABLES]
        names = sorted(name.removeprefix("HPCRAY_") for name in environ if name.startswith("HPCRAY_"))
        return [
            f"HPCRAY_{name} is no setting and has no effect; hint: HPCRAY_{near[0]}?"
            for name in names
            if name not in known and (near := get_close_matches(name, known, 1, _NEAR))
        ]

    def as_dict(self) -> dict[str, Any]:
        """All settings, for a message."""
        return asdict(self)


def _parse(name: str, text: str, kind: type) -> Any:
    try:
        if kind is bool:
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"HPCRAY_{name.upper()}={text!r} is not a valid {kind.__name__}; {_HINT}") from None


def _check(name: str, value: Any, default: Any) -> Any:
    """`value` if it is of the kind of `default`, and not negative unless that is."""
    kind = type(default)
    number = kind in (int, float)
    fits = isinstance(value, (int, kind) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    if not fits or (number and not min(0, default) <= value < float("inf")):
        hint = _HINT if number else f"hint: the default is {default!r}"
        raise ValueError(f"{name}={value!r} is not a valid {kind.__name__}; {hint}")
    return value
