"""hpcray: Ray's programming model as a native Slurm/MPI citizen. `import hpcray as ray`."""

import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

__version__ = "0.1.0"

# A node (`python -m hpcray`), `hpcray-launch`, `ray start`, `ray status` and the help of `hpcray` need none of this,
# and start sooner without. The template process of a node, from which workers are forked, executes this file again,
# when `sys.argv` is the command's (`processes.raylet_main.load_worker`).
_HELP = "", "-h", "--help", "--version"
_words = _sys.orig_argv[_sys.orig_argv.index("-m") + 1 :] if "-m" in _sys.orig_argv else []
_is_command = _sys.argv[:1] == ["-m"] and (
    _words[:1] in (["hpcray"], ["hpcray.cli.launch"])
    or (
        _words[:1] == ["hpcray.cli.ray"]
        and _words[1:2] in (["start"], ["stop"], ["symmetric-run"], ["status"], ["health-check"])
    )
    or (_words[:1] == ["hpcray.cli"] and " ".join(_words[1:]) in _HELP)
)
if not (
    _is_command
    or (_sys.argv[:1] and _sys.argv[0].endswith(("/bin/hpcray-launch", "/hpcray/launch/local_ranks.py")))
    or (_sys.argv[:1] and _sys.argv[0].endswith("/bin/hpcray") and " ".join(_sys.argv[1:]) in _HELP)
):
    import cloudpickle

    from hpcray import actor, exceptions, runtime_env, util
    from hpcray.api.actor import ActorClass, ActorHandle, ActorMethod, get_actor, kill, method
    from hpcray.api.decorator import remote
    from hpcray.api.drain import (
        checkpoint_dir,
        drain,
        draining,
        exit_unfinished,
        latest_checkpoint,
        new_checkpoint,
        on_drain,
        restart_count,
        time_left,
    )
    from hpcray.api.driver_job import LoggingConfig
    from hpcray.api.objects import cancel, get, put, wait
    from hpcray.api.runtime_context import (
        available_resources,
        cluster_resources,
        get_gpu_ids,
        get_runtime_context,
        nodes,
    )
    from hpcray.api.session import alive, init, is_initialized, shutdown
    from hpcray.runtime.core_worker.generators import DynamicObjectRefGenerator, ObjectRefGenerator
    from hpcray.runtime.core_worker.object_refs import ObjectRef
    from hpcray.runtime.core_worker.worker_output import RAY_TQDM_MAGIC as _RAY_TQDM_MAGIC
    from hpcray.runtime.core_worker.worker_output import line_filters as _line_filters

    ObjectID = ObjectRef
    """The name that Ray gives `ObjectRef` too."""

    # Workers may show bars where the driver shows none itself: what shows them is imported then.
    _line_filters[_RAY_TQDM_MAGIC] = lambda line: _import_module("hpcray.experimental.tqdm_ray").show_line(line)

if _TYPE_CHECKING:
    from hpcray import cluster, experimental, internal, mpi
    from hpcray.progress_bars import progress
    from hpcray.state import timeline
    from hpcray.util.executor import Executor

__all__ = [
    "ActorClass",
    "ActorHandle",
    "ActorMethod",
    "DynamicObjectRefGenerator",
    "Executor",
    "LoggingConfig",
    "ObjectID",
    "ObjectRef",
    "ObjectRefGenerator",
    "actor",
    "alive",
    "available_resources",
    "cancel",
    "checkpoint_dir",
    "cloudpickle",
    "cluster",
    "cluster_resources",
    "drain",
    "draining",
    "exceptions",
    "exit_unfinished",
    "experimental",
    "get",
    "get_actor",
    "get_gpu_ids",
    "get_runtime_context",
    "init",
    "internal",
    "is_initialized",
    "kill",
    "latest_checkpoint",
    "method",
    "mpi",
    "new_checkpoint",
    "nodes",
    "on_drain",
    "progress",
    "put",
    "remote",
    "restart_count",
    "runtime_env",
    "shutdown",
    "time_left",
    "timeline",
    "util",
    "wait",
]

_WHERE = {
    "Executor": "util.executor",
    "cluster": "",
    "experimental": "",
    "internal": "",
    "mpi": "",
    "progress": "progress_bars",
    "timeline": "state",
}


def __getattr__(name: str) -> object:
    """The names that many programs do not use, imported at their first use: `import hpcray` is short thanks to them."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    where = _WHERE[name]
    value: object = getattr(_import_module(f"hpcray.{where}"), name) if where else _import_module(f"hpcray.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
