"""Code that is pickled by value keeps the name of its file.

From 3.1.3 on, cloudpickle writes "<dynamic-code>" in its place. Then tracebacks of tasks show no line of source,
`hpcray stack` and profiles name no file, and a debugger finds no place to stop at.
"""

from __future__ import annotations

import types
from typing import Any

import cloudpickle

_DROPPED = "<dynamic-code>"

_reduce = cloudpickle.Pickler.dispatch_table[types.CodeType]


def reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    """Return what cloudpickle reduces `code` to, with the name of its file."""
    kind, arguments, *rest = _reduce(code)
    return kind, tuple(code.co_filename if argument == _DROPPED else argument for argument in arguments), *rest


def keep_file_names() -> None:
    """Have cloudpickle keep the names of files in this process, if its version drops them."""
    if _DROPPED in _reduce(reduce_code.__code__)[1]:
        cloudpickle.Pickler.dispatch_table[types.CodeType] = reduce_code
