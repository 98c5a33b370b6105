"""A joblib backend that runs `Parallel`, and so scikit-learn's `n_jobs`, as tasks of the job."""

from __future__ import annotations

__all__ = ["register_ray"]


def register_ray() -> None:
    """Register the backend "ray": `with joblib.parallel_config("ray"): ...`.

    Raises:
        ImportError: joblib is not installed, or is too old.
    """
    try:
        from joblib.parallel import register_parallel_backend

        from hpcray.util.joblib.ray_backend import RayBackend
    except ImportError as error:
        raise ImportError(f"register_ray() needs joblib 1.5 or newer ({error}); hint: pip install -U joblib") from error
    register_parallel_backend("ray", RayBackend)
