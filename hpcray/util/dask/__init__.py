"""Dask's collections on the CPUs of the job."""

from __future__ import annotations

try:
    from hpcray.util.dask.scheduler import disable_dask_on_ray, enable_dask_on_ray, ray_dask_get, ray_dask_get_sync
except ImportError as error:
    raise ImportError(f"hpcray.util.dask needs dask 2024.12 or newer ({error}); hint: pip install dask") from error

__all__ = ["disable_dask_on_ray", "enable_dask_on_ray", "ray_dask_get", "ray_dask_get_sync"]
