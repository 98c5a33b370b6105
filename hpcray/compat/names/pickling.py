"""`dump_debug` and `dumps_debug` of `ray.cloudpickle`, which name what does not pickle."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import IO, Any

import cloudpickle

from hpcray.util.serialization import inspect_serializability

__all__ = ["dump_debug", "dumps_debug"]

_SWITCH = "RAY_PICKLE_VERBOSE_DEBUG"


def dump_debug(obj: Any, file: IO[bytes], *args: Any, **kwargs: Any) -> None:
    """Pickle a value to a file. With RAY_PICKLE_VERBOSE_DEBUG an error prints a report of `inspect_serializability`."""
    _explained("ray.cloudpickle.dump", obj, lambda: cloudpickle.dump(obj, file, *args, **kwargs))


def dumps_debug(obj: Any, *args: Any, **kwargs: Any) -> bytes:
    """Pickle a value. With RAY_PICKLE_VERBOSE_DEBUG an error prints a report of `inspect_serializability`."""
    made: bytes = _explained("ray.cloudpickle.dumps", obj, lambda: cloudpickle.dumps(obj, *args, **kwargs))
    return made


def _explained(name: str, obj: Any, pickled: Callable[[], Any]) -> Any:
    try:
        return pickled()
    except (TypeError, pickle.PicklingError) as error:
        if os.environ.get(_SWITCH):
            inspect_serializability(obj)
            raise
        raise type(error)(f"{name}({obj}) failed: {error}. {_SWITCH}=1 shows which variables do not pickle.") from error
