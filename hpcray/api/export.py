"""Functions and classes as they are sent to workers, and the texts of what cannot be sent."""

from __future__ import annotations

import os
import sys
from typing import Any

from hpcray.common.exceptions import OufOfBandObjectRefSerializationException
from hpcray.protocol.serializability import not_serializable
from hpcray.protocol.serialization import SerializationError, Serialized, serialize
from hpcray.runtime.core_worker.core_worker import OUT_OF_BAND

LARGE = 10**7
"""Bytes of a pickled function or class above which a warning is printed."""
TOO_LARGE = 10**8
"""Bytes from which it is refused."""
_TIP = (
    "Check that its definition is not implicitly capturing a large array or other object in scope. Tip: use ray.put() "
    "to put large objects in the Ray object store."
)


def full_name(target: Any) -> str:
    """Return the module and the qualified name of a function or class."""
    return f"{target.__module__}.{getattr(target, '__qualname__', type(target).__qualname__)}"


def exported(target: Any, what: str) -> tuple[bytes, list[Any]]:
    """Pickle a function or class.

    Returns:
        The blob, and the refs inside of it.

    Raises:
        TypeError: it does not pickle; the text begins with `what` and names the variable that does not.
        OufOfBandObjectRefSerializationException: it captures a ref, which this program forbids.
    """
    try:
        blob, refs = serialize(target)
    except SerializationError as error:
        raise not_serializable(what, target) from error
    if refs and os.environ.get(OUT_OF_BAND) == "0":
        raise OufOfBandObjectRefSerializationException(
            f"{what} captures {refs[0]!r}; hint: pass it as an argument, or set {OUT_OF_BAND}=1"
        )
    return blob.join() if isinstance(blob, Serialized) else blob, refs


def check_size(blob: bytes, kind: str, name: str) -> None:
    """Print a warning for a large function or class, and raise ValueError for one that is too large.

    Args:
        kind: "remote function" or "actor".
    """
    if len(blob) >= TOO_LARGE:
        raise ValueError(
            f"The {kind} {name} is too large ({len(blob) >> 20} MiB > FUNCTION_SIZE_ERROR_THRESHOLD={TOO_LARGE >> 20} "
            f"MiB). {_TIP}"
        )
    if len(blob) > LARGE:
        print(
            f"hpcray: Warning: The {kind} {name} is very large ({len(blob) >> 20} MiB). {_TIP}",
            file=sys.stderr,
            flush=True,
        )


def unserializable_argument(error: SerializationError, name: str) -> TypeError:
    """Return the error for an argument of the function, method or constructor `name` that does not pickle."""
    return not_serializable(f"the argument % for a task or actor {name}", error.value)
