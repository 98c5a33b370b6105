"""`ray._private.runtime_env.validation`: the checks of single fields of a runtime_env."""

from __future__ import annotations

from functools import partial

from hpcray.runtime_env.runtime_env import validated_field

__all__ = [
    "parse_and_validate_conda",
    "parse_and_validate_env_vars",
    "parse_and_validate_excludes",
    "parse_and_validate_pip",
    "parse_and_validate_py_modules",
    "parse_and_validate_uv",
    "parse_and_validate_working_dir",
]

parse_and_validate_conda = partial(validated_field, "conda")
parse_and_validate_env_vars = partial(validated_field, "env_vars")
parse_and_validate_excludes = partial(validated_field, "excludes")
parse_and_validate_pip = partial(validated_field, "pip")
parse_and_validate_py_modules = partial(validated_field, "py_modules")
parse_and_validate_uv = partial(validated_field, "uv")
parse_and_validate_working_dir = partial(validated_field, "working_dir")
