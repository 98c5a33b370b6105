"""The options, schemas and summaries of the state API, as far as they are pure."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hpcray.state.schemas import (
    GetLogOptions,
    Humanify,
    ListApiOptions,
    StateResource,
    StateSchema,
    filter_fields,
    resource_to_schema,
    state_column,
)
from hpcray.state.summaries import DRIVER_TASK_ID_PREFIX, ActorSummaries, ObjectSummaries, TaskSummaries


@dataclass
class Row(StateSchema):
    a: str = state_column(filterable=True)
    b: int = state_column(filterable=False, format_fn=Humanify.memory)
    c: int | None = state_column(filterable=True, detail=True)


def test_columns_are_for_details_filters_or_always():
    assert (Row.list_columns(), Row.base_columns(), Row.filterable_columns()) == (
        ["a", "b", "c"],
        {"a", "b"},
        {"a", "c"},
    )
    row = Row("x", 3 << 20)
    assert (row["a"], row.get("c", 5), row.get("none", 5), row.asdict()) == (
        "x",
        None,
        5,
        {"a": "x", "b": 3 << 20, "c": None},
    )
    assert Row.humanify({"a": "x", "b": 3 << 20, "c": None}) == {"a": "x", "b": "3.000 MiB", "c": None}
    assert filter_fields({"a": 1, "z": 2}, Row, detail=False) == {"a": 1, "b": None}


def test_every_kind_of_row_has_its_id_among_the_filters():
    for resource in StateResource:
        assert resource_to_schema(resource).filterable_columns() <= resource_to_schema(resource).columns()
    assert "actor_id" in resource_to_schema(StateResource.ACTORS).filterable_columns()


def test_options_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="predicate"):
        ListApiOptions(filters=[("a", "<", 1)])
    assert ListApiOptions(timeout=10).timeout == 8
    for wrong in ({}, {"node_id": "1"}, {"node_id": "1", "node_ip": "2", "pid": 3}, {"actor_id": "1", "suffix": "x"}):
        with pytest.raises(ValueError):
            GetLogOptions(timeout=1, **wrong)


def task(number, parent, **more):
    row = {"task_id": f"t{number}", "parent_task_id": parent, "name": "f", "func_or_class_name": "f"}
    return {
        **row,
        "type": "NORMAL_TASK",
        "state": "FINISHED",
        "creation_time_ms": 10 + number,
        "actor_id": None,
        **more,
    }


def test_lineage_groups_siblings_of_one_name_and_leaves_out_what_has_no_parent():
    driver = DRIVER_TASK_ID_PREFIX + "01"
    tasks = [
        task(3, "t1"),
        task(1, driver, name="main"),
        task(2, "t1", state="RUNNING"),
        task(4, "lost"),
        task(5, "t1", type="ACTOR_CREATION_TASK", actor_id="a", name="A.__init__"),
        task(6, driver, type="ACTOR_TASK", actor_id="a", name="A.run", state="FAILED"),
    ]
    found = TaskSummaries.to_summary_by_lineage(
        tasks=tasks, actors=[{"actor_id": "a", "repr_name": "", "class_name": "A"}]
    )
    (root,) = found.summary
    assert (root.key, root.state_counts) == ("t1", {"FINISHED": 3, "RUNNING": 1, "FAILED": 1})
    group, actor = root.children
    assert (group.type, [child.key for child in group.children], group.timestamp) == ("GROUP", ["t2", "t3"], 12)
    assert (actor.type, actor.name, [child.key for child in actor.children]) == ("ACTOR", "A", ["t6", "t5"])
    assert (found.total_tasks, found.total_actor_tasks, found.total_actor_scheduled) == (4, 1, 1)


def test_tasks_actors_and_objects_are_counted():
    by_name = TaskSummaries.to_summary_by_func_name(
        tasks=[task(1, ""), task(2, "", state="RUNNING"), task(3, "", name="")]
    )
    assert by_name.summary["f"].state_counts == {"FINISHED": 2, "RUNNING": 1}
    actors = ActorSummaries.to_summary(actors=[{"class_name": "A", "state": "ALIVE"}] * 2)
    assert (actors.total_actors, actors.summary["A"].state_counts) == (2, {"ALIVE": 2})
    row = {"call_site": "x.py", "task_status": "FINISHED", "attempt_number": 1, "reference_type": "LOCAL_REFERENCE"}
    rows = [{**row, "object_size": size, "pid": size, "ip": "n"} for size in (-1, 1 << 20)]
    objects = ObjectSummaries.to_summary(objects=rows)
    site = objects.summary["x.py"]
    assert (site.total_objects, site.total_size_mb, site.total_num_workers, site.total_num_nodes) == (2, 1.0, 2, 1)
    assert objects.callsite_enabled and site.task_attempt_number_counts == {"1": 2}
