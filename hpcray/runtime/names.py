"""What people call the code that runs."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any


def qualified_name(called: Any) -> str:
    """Module and qualified name of a function or class; of those in a script, the script's name for `__main__`."""
    module = getattr(called, "__module__", "") or ""
    if module == "__main__":
        with contextlib.suppress(TypeError, OSError):
            module = inspect.getmodulename(inspect.getfile(inspect.unwrap(called))) or module
    return f"{module}.{getattr(called, '__qualname__', type(called).__qualname__)}"
