"""Which module of Ray is made of which modules of ours, and what is not here and why.

A name of a module is taken from the first of its sources that has it. A source that this hpcray does not have (yet) is
left out; a module that has none is not there, and says so.
"""

from __future__ import annotations

from typing import Any

RAY_VERSION = "2.60.0"
_NAMES = "hpcray.compat.names"

MODULES: dict[str, tuple[str, ...]] = {
    "ray": (f"{_NAMES}.top", "hpcray"),
    "ray.actor": (f"{_NAMES}.actor", "hpcray.actor", "hpcray.api.actor"),
    "ray.cloudpickle": ("cloudpickle",),
    "ray.cloudpickle.cloudpickle": ("cloudpickle.cloudpickle",),
    "ray.cluster_utils": ("hpcray.compat.cluster_utils",),
    "ray.data": (f"{_NAMES}.data",),
    "ray.dashboard": (),
    "ray.dashboard.utils": (f"{_NAMES}.dashboard",),
    "ray.exceptions": ("hpcray.exceptions",),
    "ray.job_config": (f"{_NAMES}.job_config",),
    "ray.job_submission": (f"{_NAMES}.job_submission",),
    "ray.remote_function": ("hpcray.api.remote_function",),
    "ray.runtime_context": (f"{_NAMES}.runtime_context", "hpcray.api.runtime_context"),
    "ray.runtime_env": ("hpcray.runtime_env",),
    "ray.ray_constants": (f"{_NAMES}.ray_constants",),
    "ray.worker": (f"{_NAMES}.private_worker", "hpcray"),
    "ray.train": (),
    "ray.train._internal": (),
    "ray.train._internal.session": (f"{_NAMES}.train_session",),
    "ray.types": (f"{_NAMES}.types",),
    "ray._raylet": (f"{_NAMES}.raylet",),
    # -------------------------------------------------------------------- util
    "ray.util": (f"{_NAMES}.util", "hpcray.util"),
    "ray.util.accelerators": ("hpcray.util.accelerators",),
    "ray.util.actor_group": ("hpcray.util.actor_group",),
    "ray.util.actor_pool": ("hpcray.util.actor_pool",),
    "ray.util.annotations": (f"{_NAMES}.annotations",),
    "ray.util.check_serialize": ("hpcray.util.check_serialize",),
    "ray.util.client": (f"{_NAMES}.client",),
    "ray.util.client.common": (f"{_NAMES}.client_common",),
    "ray.util.collective": ("hpcray.util.collective",),
    "ray.util.collective.collective": ("hpcray.util.collective",),
    "ray.util.collective.types": ("hpcray.util.collective.types", "hpcray.util.collective"),
    "ray.util.dask": ("hpcray.util.dask",),
    "ray.util.debug": (f"{_NAMES}.debug",),
    "ray.util.helpers": ("hpcray.util.helpers",),
    "ray.util.joblib": ("hpcray.util.joblib",),
    "ray.util.joblib.ray_backend": ("hpcray.util.joblib.ray_backend",),
    "ray.util.metrics": ("hpcray.util.metrics",),
    "ray.util.multiprocessing": ("hpcray.util.multiprocessing",),
    "ray.util.multiprocessing.pool": ("hpcray.util.multiprocessing.pool",),
    "ray.util.placement_group": (f"{_NAMES}.placement_group", "hpcray.util.placement_group"),
    "ray.util.queue": ("hpcray.util.queue",),
    "ray.util.scheduling_strategies": ("hpcray.util.scheduling_strategies",),
    "ray.util.serialization": ("hpcray.util.serialization",),
    "ray.util.state": ("hpcray.util.state",),
    "ray.util.state.api": ("hpcray.util.state.api", "hpcray.util.state"),
    "ray.util.state.common": ("hpcray.util.state.common", "hpcray.util.state"),
    "ray.util.state.exception": ("hpcray.util.state.exception", "hpcray.util.state"),
    "ray.util.timer": (f"{_NAMES}.timer",),
    # -------------------------------------------------------------------- experimental
    "ray.experimental": ("hpcray.experimental",),
    "ray.experimental.internal_kv": ("hpcray.experimental.internal_kv",),
    "ray.experimental.locations": ("hpcray.experimental.locations",),
    "ray.experimental.state": (),
    "ray.experimental.state.api": ("hpcray.util.state.api", "hpcray.util.state"),
    "ray.experimental.tqdm_ray": (f"{_NAMES}.tqdm_ray",),
    # -------------------------------------------------------------------- private names that clients touch
    "ray._common": (),
    "ray._common.network_utils": (f"{_NAMES}.network_utils",),
    "ray._common.utils": (f"{_NAMES}.private_utils",),
    "ray._private": (),
    "ray._private.accelerators": (f"{_NAMES}.private_accelerators",),
    "ray._private.accelerators.accelerator": (f"{_NAMES}.private_accelerators",),
    "ray._private.accelerators.nvidia_gpu": (f"{_NAMES}.private_accelerators",),
    "ray._private.client_mode_hook": (f"{_NAMES}.client_mode_hook",),
    "ray._private.internal_api": (f"{_NAMES}.internal_api", "hpcray.internal"),
    "ray._private.ray_constants": (f"{_NAMES}.ray_constants",),
    "ray._private.runtime_env": (),
    "ray._private.runtime_env.constants": (f"{_NAMES}.runtime_env_constants",),
    "ray._private.runtime_env.nsight": ("hpcray.runtime_env.nsight",),
    "ray._private.runtime_env.packaging": ("hpcray.runtime_env.packaging",),
    "ray._private.services": (f"{_NAMES}.services",),
    "ray._private.state": (f"{_NAMES}.private_state",),
    "ray._private.utils": (f"{_NAMES}.private_utils",),
    "ray._private.worker": (f"{_NAMES}.private_worker", "hpcray"),
    "ray.internal": ("hpcray.internal",),
}
"""`()`: a module that only holds others."""

ATTRIBUTES: dict[str, dict[str, Any]] = {"ray": {"__version__": RAY_VERSION, "__commit__": "hpcray"}}

LIBRARIES = ("air", "data", "llm", "rllib", "serve", "train", "tune", "workflow")
"""Ray's own libraries on top of Core. They are pure Python and can be lent from a real wheel (`finder.lend`)."""

_WHY: dict[str, str] = {
    **dict.fromkeys(
        (f"ray.{name}" for name in LIBRARIES),
        "Ray's libraries (Data, Train, Tune, Serve, RLlib, LLM) are no part of hpcray, which is Ray's Core; "
        "docs/ray-compatibility.md says how a real wheel lends them",
    ),
    "ray._private.log_monitor": "hpcray has no log files to watch: what workers print goes to the driver's terminal",
    "ray._private.ray_option_utils": "Ray 2.60 does not have it either",
    "ray._private.test_utils": "it belongs to Ray's own tests",
    "ray.autoscaler": "the nodes of a job are those that its launcher started",
    "ray.client": "there is no Ray Client (ray://); hint: init(address='auto') on a node of the job",
    "ray.core": "the protocol buffers of Ray's own processes",
    "ray.cpp_function": "there are no workers in other languages",
    "ray.cross_language": "there are no workers in other languages",
    "ray.dag": "compiled graphs are not supported; hint: call .remote() instead of .bind()",
    "ray.dashboard": "there is no dashboard and no HTTP server; hint: `hpcray status`, ray.util.state",
    "ray.experimental.channel": "compiled graphs are not supported; hint: call .remote() instead of .bind()",
    "ray.java_actor_class": "there are no workers in other languages",
    "ray.java_function": "there are no workers in other languages",
    "ray.util.horovod": "Ray 2.60 does not have it either",
    "ray.util.sgd": "Ray 2.60 does not have it either",
    "ray.util.spark": "it starts Ray on Spark; hpcray is started by Slurm or mpirun",
}


def sources_of(module: str) -> tuple[str, ...] | None:
    """The modules that a module of Ray is made of, () where it only holds others; None: not here."""
    return MODULES.get(module)


def submodules(module: str) -> list[str]:
    """The names of the modules directly below one."""
    prefix = f"{module}."
    return [name[len(prefix) :] for name in MODULES if name.startswith(prefix) and "." not in name[len(prefix) :]]


def why_missing(full: str) -> str:
    """One sentence about a name or module that is asked for and not here."""
    parts = full.split(".")
    for end in range(len(parts), 0, -1):
        if reason := _WHY.get(".".join(parts[:end])):
            return f"hpcray does not have {full}: {reason}"
    return f"hpcray does not have {full} (it serves the names of Ray {RAY_VERSION} listed in docs/ray-compatibility.md)"
