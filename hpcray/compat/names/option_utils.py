"""`ray._common.ray_option_utils`: the rules of options under Ray's names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from hpcray.api.actor import ActorClass, make_actor_class
from hpcray.api.options import ACTOR_RULES, TASK_RULES, ActorOptions, TaskOptions
from hpcray.api.options import Rule as Option
from hpcray.runtime_env.runtime_env import validated_field

__all__ = [
    "Option",
    "actor_options",
    "parse_and_validate_conda",
    "parse_and_validate_env_vars",
    "parse_and_validate_excludes",
    "parse_and_validate_pip",
    "parse_and_validate_py_modules",
    "parse_and_validate_uv",
    "parse_and_validate_working_dir",
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


# ------------------------------------------------------------ validation
# `ray._private.runtime_env.validation`: the checks of single fields of a runtime_env.


parse_and_validate_conda = partial(validated_field, "conda")
parse_and_validate_env_vars = partial(validated_field, "env_vars")
parse_and_validate_excludes = partial(validated_field, "excludes")
parse_and_validate_pip = partial(validated_field, "pip")
parse_and_validate_py_modules = partial(validated_field, "py_modules")
parse_and_validate_uv = partial(validated_field, "uv")
parse_and_validate_working_dir = partial(validated_field, "working_dir")


# ------------------------------------------------------------ actor class
# `ray.actor._modify_class`.


def _modify_class(cls: type) -> type:
    """Make a subclass of the same name, so that attributes set on it do not reach the user's class.

    Ray adds methods of its own to the subclass; hpcray adds none.

    Raises:
        TypeError: the argument is an actor class, or no class.
    """
    if isinstance(cls, ActorClass):
        raise TypeError("a plain class is required, not an actor class")
    if not isinstance(cls, type):
        raise TypeError(f"a class is required, not {type(cls).__name__}")
    if hasattr(cls, "__ray_actor_class__"):
        return cls
    body: dict[str, Any] = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "__qualname__": cls.__qualname__,
        "__ray_actor_class__": cls,
    }
    return type(cls)(cls.__name__, (cls,), body)


def _make_actor(cls: type, actor_options: dict[str, Any]) -> ActorClass[Any]:
    """Make an actor class of a plain one, as `ray.remote` with these options does."""
    return make_actor_class(_modify_class(cls), ActorOptions(actor_options))
