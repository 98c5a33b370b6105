"""`ray._common.ray_option_utils`: the rules of options under Ray's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcray.api.options import ACTOR_RULES, TASK_RULES, ActorOptions, TaskOptions
from hpcray.api.options import Rule as Option

__all__ = [
    "Option",
    "actor_options",
    "task_options",
    "update_options",
    "valid_options",
    "validate_actor_options",
    "validate_task_options",
]

task_options = dict(TASK_RULES)
actor_options = dict(ACTOR_RULES)
valid_options = {**task_options, **actor_options}


def validate_task_options(options: Mapping[str, Any], in_options: bool) -> None:
    """Raise TypeError or ValueError for options that `remote`, or `.options()` of a remote function, refuses."""
    TaskOptions().merged(**options) if in_options else TaskOptions(options)


def validate_actor_options(options: Mapping[str, Any], in_options: bool) -> None:
    """Raise TypeError or ValueError for options that `remote`, or `.options()` of an actor class, refuses."""
    ActorOptions().merged(**options) if in_options else ActorOptions(options)


def update_options(original_options: Mapping[str, Any], new_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the options with the new ones in them."""
    return {**original_options, **new_options}
