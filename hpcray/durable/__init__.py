"""Results of tasks that outlive their job (docs/how-to/durable.md). Here: the option `durable=`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

__all__ = ["DurableOptions"]


@dataclass(frozen=True)
class DurableOptions:
    """How the results of a remote function are kept.

    Args:
        name: stands for the function in lists, and is part of the key.
        version: part of the key; a new one has everything computed again.
        inputs: files and directories that the function reads: their content is part of the key. The name of a
            parameter stands for the files that its argument names: a path, or a list of paths.
        ignore: names of parameters that are no part of the key.
        errors: whether exceptions are kept too.
        expires: seconds (or a timedelta) after which a result is computed again.

    Raises:
        TypeError, ValueError: one of them is not of this kind.
    """

    name: str = ""
    version: str | int = ""
    inputs: Sequence[str | os.PathLike[str]] = ()
    ignore: Sequence[str] = ()
    errors: bool = False
    expires: float | timedelta | None = None

    def __post_init__(self) -> None:
        for field, kinds in (("name", str), ("version", (str, int)), ("errors", bool)):
            value = getattr(self, field)
            if not isinstance(value, kinds):
                raise TypeError(f"DurableOptions: {field} is {value!r}, which is a {type(value).__name__}")
        allowed: dict[str, tuple[type, ...]] = {"inputs": (str, os.PathLike), "ignore": (str,)}
        for field, types in allowed.items():
            value = getattr(self, field)
            if isinstance(value, (str, bytes)) or not all(isinstance(item, types) for item in value):
                raise TypeError(f"DurableOptions: {field} is a list of names; got {value!r}")
            object.__setattr__(self, field, tuple(value))
        if self.expires is not None and not 0 < self.lifetime < math.inf:
            raise ValueError(f"DurableOptions: expires is a positive number of seconds; got {self.expires!r}")

    @property
    def lifetime(self) -> float:
        """Seconds for which a result may be used; infinite without `expires`."""
        if self.expires is None:
            return math.inf
        return self.expires.total_seconds() if isinstance(self.expires, timedelta) else float(self.expires)


def read_durable(value: Any) -> DurableOptions | None:
    """Return the options that a value of `durable=` stands for; None where nothing is kept.

    Raises:
        TypeError: it is none of those.
    """
    if value is None or value is False:
        return None
    if isinstance(value, DurableOptions):
        return value
    if value is True:
        return DurableOptions()
    if isinstance(value, str) and value:
        return DurableOptions(name=value)
    raise TypeError(f"durable is True, a name or DurableOptions(...); got {value!r}")
