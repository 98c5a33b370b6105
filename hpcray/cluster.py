"""Batch jobs from Python: `hpcray.cluster.submit` starts one, `scale` adds nodes to the running one and removes them,
the other names find jobs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcray.jobs.added_nodes import remove_nodes, scale
    from hpcray.jobs.submission import submit
    from hpcray.jobs.submitted_job import SubmittedJob as Job
    from hpcray.jobs.submitted_job import find_job, list_jobs

__all__ = ["Job", "find_job", "list_jobs", "remove_nodes", "scale", "submit"]

_HOMES = {"Job": "submitted_job", "find_job": "submitted_job", "list_jobs": "submitted_job", "submit": "submission"}
_HOMES |= {"remove_nodes": "added_nodes", "scale": "added_nodes"}


def __getattr__(name: str) -> Any:
    """The public names, imported at their first use: `import hpcray` needs none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"hpcray.jobs.{_HOMES[name]}"), "SubmittedJob" if name == "Job" else name)
    globals()[name] = value
    return value
