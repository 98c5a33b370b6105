"""Dask collections computed by tasks of the job: each node of the graph is a task, each edge a ref."""

from __future__ import annotations

try:
    import dask
    from dask._task_spec import convert_legacy_graph as _needed  # noqa: F401
except ImportError as error:
    raise ImportError(f"hpcray.util.dask needs dask 2024.12 or newer ({error}); hint: pip install dask") from error

from hpcray.util.dask.callbacks import (
    ProgressBarCallback,
    RayDaskCallback,
    local_ray_callbacks,
    unpack_ray_callbacks,
)
from hpcray.util.dask.scheduler import (
    dataframe_optimize,
    disable_dask_on_ray,
    enable_dask_on_ray,
    ray_dask_get,
    ray_dask_get_sync,
    ray_dask_persist,
)

__all__ = [
    "ProgressBarCallback",
    "RayDaskCallback",
    "dataframe_optimize",
    "disable_dask_on_ray",
    "enable_dask_on_ray",
    "local_ray_callbacks",
    "ray_dask_get",
    "ray_dask_get_sync",
    "ray_dask_persist",
    "unpack_ray_callbacks",
]

del dask
