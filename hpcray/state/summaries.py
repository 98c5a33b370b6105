"""Rows of the state API counted by function, lineage, class or place of creation, in Ray's shapes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TaskRow = Mapping[str, Any]

DRIVER_TASK_ID_PREFIX = "f" * 40
"""Ids of parent tasks begin so where the parent is a driver."""
_MIB = 1 << 20
_CREATION, _CALL, _TASK = "ACTOR_CREATION_TASK", "ACTOR_TASK", "NORMAL_TASK"
_RUNNING = ("RUNNING", "RUNNING_IN_RAY_GET", "RUNNING_IN_RAY_WAIT")
_PENDING = ("PENDING_ARGS_AVAIL", "PENDING_NODE_ASSIGNMENT", "PENDING_OBJ_STORE_MEM_AVAIL", "PENDING_ARGS_FETCH")


@dataclass
class TaskSummaryPerFuncOrClassName:
    """Tasks of one name, counted by state."""

    func_or_class_name: str
    type: str
    state_counts: dict[str, int] = field(default_factory=dict)


@dataclass
class Link:
    """The task or actor that a group of tasks stands for."""

    type: str
    id: str


@dataclass
class NestedTaskSummary:
    """A task, an actor ("ACTOR") or tasks of one name ("GROUP"), with what was started from there."""

    name: str
    key: str
    type: str
    timestamp: int | None = None
    state_counts: dict[str, int] = field(default_factory=dict)
    children: list[NestedTaskSummary] = field(default_factory=list)
    link: Link | None = None

    def count(self, states: Sequence[str]) -> int:
        """Return the number of tasks in one of these states."""
        return sum(self.state_counts.get(state, 0) for state in states)


@dataclass
class TaskSummaries:
    """All tasks, counted. `summary`: by name, or the tree of lineage."""

    summary: dict[str, TaskSummaryPerFuncOrClassName] | list[NestedTaskSummary]
    total_tasks: int
    total_actor_tasks: int
    total_actor_scheduled: int
    summary_by: str = "func_name"

    @classmethod
    def to_summary_by_func_name(cls, *, tasks: Sequence[TaskRow]) -> TaskSummaries:
        """Count tasks by their name, else by that of the function or class."""
        summary: dict[str, TaskSummaryPerFuncOrClassName] = {}
        for task in tasks:
            name = _name(task)
            _count(summary.setdefault(name, TaskSummaryPerFuncOrClassName(name, task["type"])).state_counts, task)
        return cls(summary, *_totals(tasks))

    @classmethod
    def to_summary_by_lineage(cls, *, tasks: Sequence[TaskRow], actors: Sequence[Mapping[str, Any]]) -> TaskSummaries:
        """Group tasks by what started them: an actor's below the actor, others below their parent task.

        Siblings of one name become a group. Running ones come first, then pending and failed ones, then by time. Tasks
        whose parents are not known are left out of the tree.
        """
        tree = _LineageTree(tasks, actors)
        counted = [task for task in tasks if tree.add(task)]
        summary, _ = _merged(tree.roots)
        for group in summary:
            _total(group)
        _sort(summary)
        return cls(summary, *_totals(counted), summary_by="lineage")


@dataclass
class ActorSummaryPerClass:
    """Actors of one class, counted by state."""

    class_name: str
    state_counts: dict[str, int] = field(default_factory=dict)


@dataclass
class ActorSummaries:
    """All actors, counted by class."""

    summary: dict[str, ActorSummaryPerClass]
    total_actors: int
    summary_by: str = "class"

    @classmethod
    def to_summary(cls, *, actors: Sequence[Mapping[str, Any]]) -> ActorSummaries:
        """Count actors by class."""
        summary: dict[str, ActorSummaryPerClass] = {}
        for actor in actors:
            name = actor["class_name"]
            _count(summary.setdefault(name, ActorSummaryPerClass(name)).state_counts, actor)
        return cls(summary, len(actors))


@dataclass
class ObjectSummaryPerKey:
    """Objects of one place of creation, counted by state and type of reference."""

    total_objects: int
    total_size_mb: float
    total_num_workers: int
    total_num_nodes: int
    task_state_counts: dict[str, int] = field(default_factory=dict)
    task_attempt_number_counts: dict[str, int] = field(default_factory=dict)
    ref_type_counts: dict[str, int] = field(default_factory=dict)


@dataclass
class ObjectSummaries:
    """All objects, counted by the place of their creation."""

    summary: dict[str, ObjectSummaryPerKey]
    total_objects: int
    total_size_mb: float
    callsite_enabled: bool
    summary_by: str = "callsite"

    @classmethod
    def to_summary(cls, *, objects: Sequence[Mapping[str, Any]]) -> ObjectSummaries:
        """Count objects by their place of creation; "disabled": none is recorded. A size of -1 is unknown."""
        by_site: dict[str, list[Mapping[str, Any]]] = {}
        for row in objects:
            by_site.setdefault(row["call_site"], []).append(row)
        summary = {}
        for site, rows in by_site.items():
            known = summary[site] = ObjectSummaryPerKey(
                len(rows), _megabytes(rows), len({row["pid"] for row in rows}), len({row["ip"] for row in rows})
            )
            for row in rows:
                _count(known.task_state_counts, row, "task_status")
                _count(known.task_attempt_number_counts, {"state": str(row["attempt_number"])})
                _count(known.ref_type_counts, row, "reference_type")
        return cls(summary, len(objects), _megabytes(objects), "disabled" not in by_site)


@dataclass
class StateSummary:
    """Summaries by node; "cluster" where they are of all nodes."""

    node_id_to_summary: dict[str, TaskSummaries | ActorSummaries | ObjectSummaries]


class _LineageTree:
    """The tree of tasks and actors by what started them.

    Attributes:
        roots: what the drivers started.
    """

    def __init__(self, tasks: Sequence[TaskRow], actors: Sequence[Mapping[str, Any]]) -> None:
        self._tasks = {task["task_id"]: task for task in tasks}
        self._creations = {
            task["actor_id"]: self._tasks[task["task_id"]] for task in tasks if task["type"] == _CREATION
        }
        self._actors = {actor["actor_id"]: actor for actor in actors}
        self._groups: dict[str, NestedTaskSummary] = {}
        self.roots: list[NestedTaskSummary] = []

    def add(self, task: TaskRow) -> bool:
        """Count a task at its place. Returns False if there is no place for it."""
        group = self._of_task(task["task_id"], task)
        if group is not None:
            _count(group.state_counts, task)
        return group is not None

    def _of_task(self, task_id: str, for_task: TaskRow) -> NestedTaskSummary | None:
        """Return the group of a task, made on behalf of `for_task`; None where the task is not known."""
        task = self._tasks.get(task_id)
        if task_id in self._groups or task is None:
            return self._groups.get(task_id)
        group = self._groups[task_id] = NestedTaskSummary(
            _name(task), task_id, task["type"], task["creation_time_ms"], link=Link("task", task_id)
        )
        if task["type"] in (_CALL, _CREATION):
            parent = self._of_actor(task["actor_id"], for_task)
            if parent is not None:
                parent.children.append(group)
        else:
            self._place(group, task, for_task)
        return group

    def _of_actor(self, actor_id: str, for_task: TaskRow) -> NestedTaskSummary | None:
        key = f"actor:{actor_id}"
        creation = self._creations.get(actor_id)
        if key in self._groups or creation is None:
            return self._groups.get(key)
        actor = self._actors.get(actor_id)
        if actor is None:
            name = creation["func_or_class_name"].split(".")[0]
        else:
            name = actor["repr_name"] or actor["class_name"]
        group = self._groups[key] = NestedTaskSummary(
            name, key, "ACTOR", for_task["creation_time_ms"], link=Link("actor", actor_id)
        )
        self._place(group, creation, for_task)
        return group

    def _place(self, group: NestedTaskSummary, started_by: TaskRow, for_task: TaskRow) -> None:
        parent_id = started_by["parent_task_id"]
        if not parent_id or parent_id.startswith(DRIVER_TASK_ID_PREFIX):
            self.roots.append(group)
        elif (parent := self._of_task(parent_id, for_task)) is not None:
            parent.children.append(group)


def _merged(siblings: list[NestedTaskSummary]) -> tuple[list[NestedTaskSummary], int | None]:
    """Put siblings of one name into a group, at all levels. Returns (siblings, earliest time of theirs)."""
    groups: dict[str, NestedTaskSummary] = {}
    for child in siblings:
        child.children, earliest = _merged(child.children)
        child.timestamp = _earlier(child.timestamp, earliest)
        group = groups.setdefault(child.name, NestedTaskSummary(child.name, child.name, "GROUP"))
        group.children.append(child)
        group.timestamp = _earlier(group.timestamp, child.timestamp)
    times = [group.timestamp for group in groups.values() if group.timestamp]
    merged = [group if len(group.children) > 1 else group.children[0] for group in groups.values()]
    return merged, min(times, default=None)


def _earlier(one: int | None, other: int | None) -> int | None:
    return other if other and other < (one or sys.maxsize) else one


def _total(group: NestedTaskSummary) -> None:
    """Add the counts of all children, and sort them."""
    for child in group.children:
        _total(child)
        for state, number in child.state_counts.items():
            group.state_counts[state] = group.state_counts.get(state, 0) + number
    _sort(group.children)


def _sort(groups: list[NestedTaskSummary]) -> None:
    groups.sort(
        key=lambda group: (
            -group.count(_RUNNING),
            -group.count(_PENDING),
            -group.count(("FAILED",)),
            group.timestamp or sys.maxsize,
            group.type != _CREATION,
        )
    )


def _name(task: TaskRow) -> str:
    name: str = task.get("name") or task.get("func_or_class_name") or ""
    return name


def _totals(tasks: Sequence[TaskRow]) -> tuple[int, int, int]:
    kinds = [task["type"] for task in tasks]
    return kinds.count(_TASK), kinds.count(_CALL), kinds.count(_CREATION)


def _count(counts: dict[str, int], row: Mapping[str, Any], column: str = "state") -> None:
    counts[row[column]] = counts.get(row[column], 0) + 1


def _megabytes(rows: Sequence[Mapping[str, Any]]) -> float:
    return float(sum(row["object_size"] for row in rows if row["object_size"] != -1) / _MIB)
