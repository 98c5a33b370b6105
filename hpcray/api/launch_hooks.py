"""Functions that are called at each launch of a task or actor from this process, before it is submitted.

Ray's libraries set them: a trial of Tune refuses a task that none of its bundles has room for, which would wait for
ever. Where there is none, launches cost nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hpcray.api.scheduling_strategies import PlacementGroupSchedulingStrategy
from hpcray.runtime.core_worker.core_worker import current


class LaunchedFunction(NamedTuple):
    """The function of a task, or the constructor of an actor. class_name: of the actor; "" for a task."""

    module_name: str
    class_name: str
    function_name: str


LaunchHook = Callable[[LaunchedFunction, Mapping[str, float], Any], object]
"""Called with the function, the resources, and the scheduling strategy: that of a placement group too if it comes from
the caller. What it raises is raised by `remote()`."""


task_hooks: list[LaunchHook] = []
"""The hook of tasks, if there is one."""
actor_hooks: list[LaunchHook] = []
"""The hook of actors, if there is one."""


def set_task_launch_hook(hook: LaunchHook | None) -> None:
    """Have `hook` called at each launch of a task; None: no more."""
    task_hooks[:] = [hook] if hook is not None else []
    process = current.process
    for function in list(process.placement_groups.bound) if process is not None else ():
        function.unbind()  # their next calls find out that there is a hook


def set_actor_launch_hook(hook: LaunchHook | None) -> None:
    """Have `hook` called at each launch of an actor; None: no more."""
    actor_hooks[:] = [hook] if hook is not None else []


def launched(hooks: list[LaunchHook], what: Any, resources: Mapping[str, float], strategy: Any) -> None:
    """Call the hook.

    Args:
        what: the function, or the class of an actor.
    """
    module, name = getattr(what, "__module__", ""), getattr(what, "__qualname__", "")
    is_class = isinstance(what, type)
    function = LaunchedFunction(module, name if is_class else "", "__init__" if is_class else name)
    for hook in hooks:
        hook(function, resources, strategy)


def strategy_in_force(given: Mapping[str, Any], group: tuple[Any, int, bool] | None) -> Any:
    """Return the strategy of a launch with these options, in this group with its bundle and whether it captures."""
    if group is not None:
        return PlacementGroupSchedulingStrategy(*group)
    return given.get("scheduling_strategy") or "DEFAULT"
