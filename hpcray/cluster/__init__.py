"""Slurm, Open MPI launch lines, submission. `hpcray.cluster.submit` starts jobs from Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcray.cluster.jobs import Job, find_job, list_jobs
    from hpcray.cluster.submission import submit

__all__ = ["Job", "find_job", "list_jobs", "submit"]

_HOMES = {"Job": "jobs", "find_job": "jobs", "list_jobs": "jobs", "submit": "submission"}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first used: `import hpcray` needs none of them."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
