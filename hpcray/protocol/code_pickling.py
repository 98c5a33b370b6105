"""Functions that are pickled by value: their code keeps the name of its file, and cached ones are functions too.

From 3.1.3 on, cloudpickle writes "<dynamic-code>" in its place. Then tracebacks of tasks show no line of source,
`hpcray stack` and profiles name no file, and a debugger finds no place to stop at.

Functions with `functools.cache` pickle by name alone. Those of a program, or made in a function, cannot be found by it
elsewhere: they travel as the function inside, and get a cache of their own, empty, where they arrive.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import cloudpickle

_DROPPED = "<dynamic-code>"

_reduce = cloudpickle.Pickler.dispatch_table[types.CodeType]


def _is_dropped(argument: object) -> bool:
    return isinstance(argument, str) and argument == _DROPPED  # others are bytes, which `python -bb` compares to none


def reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    """Return what cloudpickle reduces `code` to, with the name of its file."""
    kind, arguments, *rest = _reduce(code)
    return kind, tuple(code.co_filename if _is_dropped(argument) else argument for argument in arguments), *rest


def keep_file_names() -> None:
    """Have cloudpickle keep the names of files in this process, if its version drops them."""
    cloudpickle.Pickler.dispatch_table[functools._lru_cache_wrapper] = reduce_cached
    if any(map(_is_dropped, _reduce(reduce_code.__code__)[1])):
        cloudpickle.Pickler.dispatch_table[types.CodeType] = reduce_code


class _LateFunction:
    """The function in a cache that is made before its function is read: that may refer to the cache, or call itself."""

    def __init__(self) -> None:
        self.functions: list[Callable[..., Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.functions[0](*args, **kwargs)


def reduce_cached(cached: Any) -> Any:
    """Return what a function with a cache reduces to: its name where others can import it, else a new one."""
    if _can_be_imported(cached):
        return cached.__qualname__
    parameters = cached.cache_parameters()
    made = parameters["maxsize"], parameters["typed"]
    return _new_cached, made, cached.__wrapped__, None, None, _fill_cached


def _can_be_imported(cached: Any) -> bool:
    name = cached.__module__
    if name in ("__main__", *cloudpickle.list_registry_pickle_by_value()):
        return False
    try:
        return bool(attrgetter(cached.__qualname__)(sys.modules[name]) is cached)
    except (AttributeError, KeyError):
        return False


def _new_cached(maxsize: int | None, typed: bool) -> Any:
    inside = _LateFunction()
    cached: Any = functools.lru_cache(maxsize, typed)(inside)
    cached._inside = inside
    return cached


def _fill_cached(cached: Any, function: Callable[..., Any]) -> None:
    vars(cached).pop("_inside").functions.append(function)
    functools.update_wrapper(cached, function)
