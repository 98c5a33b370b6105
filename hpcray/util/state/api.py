"""The functions of `hpcray.util.state`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hpcray.state.attach import attached
from hpcray.state.rows import Filter, Rows, select
from hpcray.state.schemas import (
    ActorState,
    JobState,
    NodeState,
    ObjectState,
    PlacementGroupState,
    StateSchema,
    TaskState,
    WorkerState,
)

DEFAULT_LIMIT = 100
DEFAULT_TIMEOUT = 30
_ALL = 1 << 62

Row = TypeVar("Row", bound=StateSchema)
Found = TypeVar("Found")
Filters = Sequence[Filter]


class RayStateApiException(Exception):
    """Some of what was asked for is not known: a process did not answer."""


def _gathered(gather: Callable[[Rows], Found], address: str | None, timeout: float, strict: bool) -> Found:
    with attached(address or "auto") as process:
        rows = Rows(process, timeout)
        found = gather(rows)
    if rows.missing:
        text = f"the answer is not complete: {'; '.join(rows.missing)}"
        if strict:
            raise RayStateApiException(f"{text}; hint: raise_on_missing_output=False gives what is known")
        warnings.warn(text, stacklevel=3)
    return found


def _list(
    gather: Callable[[Rows], list[Row]],
    address: str | None,
    filters: Filters | None,
    limit: int,
    timeout: float,
    detail: bool,
    strict: bool,
) -> list[Row]:
    if limit < 1:
        raise ValueError(f"limit={limit} is not valid; hint: at least 1")
    chosen = select(_gathered(gather, address, timeout, strict), filters, limit)
    if not detail:
        for row in chosen:
            for name in set(row.columns()) - set(row.base_columns()):
                setattr(row, name, None)
    return chosen


def _get(
    gather: Callable[[Rows], list[Row]], column: str, ident: str, address: str | None, timeout: float
) -> Row | None:
    found = _list(gather, address, [(column, "=", ident)], _ALL, timeout, True, False)
    return found[0] if found else None


def list_actors(
    address: str | None = None,
    filters: Filters | None = None,
    limit: int = DEFAULT_LIMIT,
    timeout: float = DEFAULT_TIMEOUT,
    detail: bool = False,
    raise_on_missing_output: bool = True,
    _explain: bool = False,
) -> list[ActorState]:
    """The actors of the job, dead ones too."""
    return _list(Rows.actors, address, filters, limit, timeout, detail, raise_on_missing_output)


def list_placement_groups(
    address: str | None = None,
    filters: Filters | None = None,
    limit: int = DEFAULT_LIMIT,
    timeout: float = DEFAULT_TIMEOUT,
    detail: bool = False,
    raise_on_missing_output: bool = True,
    _explain: bool = False,
) -> list[PlacementGroupState]:
    """The placement groups of the job."""
    return _list(Rows.placement_groups, address, filters, limit, timeout, detail, raise_on_missing_output)


def list_nodes(
    address: str | None = None,
    filters: Filters | None = None,
    limit: int = DEFAULT_LIMIT,
    timeout: float = DEFAULT_TIMEOUT,
    detail: bool = False,
    raise_on_missing_output: bool = True,
    _explain: bool = False,
) -> list[NodeState]:
    """The nodes of the job, dead ones too."""
    return _list(Rows.nodes, address, filters, limit, timeout, detail, raise_on_missing_output)


def list_jobs(
    address: str | None = None,
    filters: Filters | None = None,
    limit: int = DEFAULT_LIMIT,
    timeout: float = DEFAULT_TIMEOUT,
    detail: bool = False,
    raise_on_missing_output: bool = True,
    _explain: bool = False,
) -> list[JobState]:
    """The job: one. (Jobs of the batch system: `hpcray jobs`.)"""
    return _list(Rows.jobs, address, filters, limit, timeout, detail, raise_on_missing_output)


def list_workers(
    address: str | None = None,
    filters: Filters | None = None,
    limit: int = DEFAULT_LIMIT,
    timeout: float = DEFAULT_TIMEOUT,
    detail: bool = False,
    raise_on_missing_output: bool = True,
    _explain: bool = False,
) -> list[WorkerState]:
    """The processes of the job that live: drivers and workers."""
    return _list(Rows.workers, address, filters, limit, timeout, detail, raise_on_missing_output)


def list_tasks(
    address: str | None = None,
    filters: Filters | None = None,
    limit: int = DEFAULT_LIMIT,
    timeout: float = DEFAULT_TIMEOUT,
    detail: bool = False,
    raise_on_missing_output: bool = True,
    _explain: bool = False,
) -> list[TaskState]:
    """Tasks and calls: all that have not returned, and of those that have what living workers remember."""
    return _list(Rows.tasks, address, filters, limit, timeout, detail, raise_on_missing_output)


def list_objects(
    address: str | None = None,
    filters: Filters | None = None,
    limit: int = DEFAULT_LIMIT,
    timeout: float = DEFAULT_TIMEOUT,
    detail: bool = False,
    raise_on_missing_output: bool = True,
    _explain: bool = False,
) -> list[ObjectState]:
    """The references that processes hold. See `hpcray memory` for what the stores hold."""
    return _list(Rows.objects, address, filters, limit, timeout, detail, raise_on_missing_output)


def get_actor(
    id: str, address: str | None = None, timeout: float = DEFAULT_TIMEOUT, _explain: bool = False
) -> ActorState | None:
    """The actor with this id; None when there is none."""
    return _get(Rows.actors, "actor_id", id, address, timeout)


def get_placement_group(
    id: str, address: str | None = None, timeout: float = DEFAULT_TIMEOUT, _explain: bool = False
) -> PlacementGroupState | None:
    """The placement group with this id; None when there is none."""
    return _get(Rows.placement_groups, "placement_group_id", id, address, timeout)


def get_node(
    id: str, address: str | None = None, timeout: float = DEFAULT_TIMEOUT, _explain: bool = False
) -> NodeState | None:
    """The node with this id; None when there is none."""
    return _get(Rows.nodes, "node_id", id, address, timeout)


def get_job(
    id: str, address: str | None = None, timeout: float = DEFAULT_TIMEOUT, _explain: bool = False
) -> JobState | None:
    """The job with this id; None when it is not this one."""
    return _get(Rows.jobs, "job_id", id, address, timeout)


def get_worker(
    id: str, address: str | None = None, timeout: float = DEFAULT_TIMEOUT, _explain: bool = False
) -> WorkerState | None:
    """The process with this id; None when there is none that lives."""
    return _get(Rows.workers, "worker_id", id, address, timeout)


def get_task(
    id: str, address: str | None = None, timeout: float = DEFAULT_TIMEOUT, _explain: bool = False
) -> TaskState | None:
    """The task or call with this id; None when nobody remembers it."""
    return _get(Rows.tasks, "task_id", id, address, timeout)


def get_objects(
    id: str, address: str | None = None, timeout: float = DEFAULT_TIMEOUT, _explain: bool = False
) -> list[ObjectState]:
    """All references to one object."""
    return _list(Rows.objects, address, [("object_id", "=", id)], _ALL, timeout, True, False)


def summarize_tasks(
    address: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    raise_on_missing_output: bool = True,
    _explain: bool = False,
) -> dict[str, Any]:
    """How many tasks and calls there are, by name and state."""
    return _gathered(Rows.summarize_tasks, address, timeout, raise_on_missing_output)


def summarize_actors(
    address: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    raise_on_missing_output: bool = True,
    _explain: bool = False,
) -> dict[str, Any]:
    """How many actors there are, by class and state."""
    return _gathered(Rows.summarize_actors, address, timeout, raise_on_missing_output)


def summarize_objects(
    address: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    raise_on_missing_output: bool = True,
    _explain: bool = False,
) -> dict[str, Any]:
    """How many references there are, and their sizes, by where they were made (`record_ref_creation_sites`)."""
    return _gathered(Rows.summarize_objects, address, timeout, raise_on_missing_output)
