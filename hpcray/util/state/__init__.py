"""Ray's state API: what there is in the job now. Also `hpcray list` and `hpcray summary`.

All functions take: address (None: the job of this program, else the newest of this user on this machine), filters
([(column, "=" or "!=", value)]), limit (rows), timeout (seconds that a process may take to answer), detail (fill in all
fields), raise_on_missing_output (an error when somebody did not answer; else a warning).
"""

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
from hpcray.util.state.api import (
    RayStateApiException,
    get_actor,
    get_job,
    get_node,
    get_objects,
    get_placement_group,
    get_task,
    get_worker,
    list_actors,
    list_jobs,
    list_nodes,
    list_objects,
    list_placement_groups,
    list_tasks,
    list_workers,
    summarize_actors,
    summarize_objects,
    summarize_tasks,
)

__all__ = [
    "ActorState",
    "JobState",
    "NodeState",
    "ObjectState",
    "PlacementGroupState",
    "RayStateApiException",
    "StateSchema",
    "TaskState",
    "WorkerState",
    "get_actor",
    "get_job",
    "get_node",
    "get_objects",
    "get_placement_group",
    "get_task",
    "get_worker",
    "list_actors",
    "list_jobs",
    "list_nodes",
    "list_objects",
    "list_placement_groups",
    "list_tasks",
    "list_workers",
    "summarize_actors",
    "summarize_objects",
    "summarize_tasks",
]
