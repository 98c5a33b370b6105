"""`import ray` without Ray: its module names, served by hpcray.

Three ways in, which end in `install()`:

- `python -m hpcray --as-ray script.py`: the directory `STANDIN` goes in front of PYTHONPATH;
- `import hpcray.compat.ray` before the first `import ray`;
- the distribution "ray" that `pip install hpcray/compat/standin` makes, or `python -m hpcray.compat install`.

`STANDIN` holds a package `ray` whose only act is `install()`, and the metadata of a distribution "ray". It is on the
import path of whoever installed us, and so, like the rest of that path, on the path of every worker of the job.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from types import ModuleType

from hpcray.compat.finder import FINDER, LENT, RAY_VERSION, STANDIN, Facade, lend
from hpcray.runtime.repeated_lines import VARIABLE

__all__ = ["RAY_VERSION", "STANDIN", "install", "installed", "lend"]


def install(replacing: ModuleType | None = None) -> ModuleType:
    """Serve `import ray` and everything below from now on, in this process and in the workers that it will use.

    Call it before `init()`: that is when workers are told the import path. Lines that several workers print alike are
    shown once from then on, as Ray does it, unless RAY_DEDUP_LOGS says otherwise.

    Args:
        replacing: a module `ray` that may be taken out of `sys.modules`.

    Returns:
        The module `ray`.

    Raises:
        ImportError: the real Ray is imported already (nothing is changed), or HPCRAY_RAY_LIBRARIES names no wheel.
    """
    present = sys.modules.get("ray")
    if present is not None and present is not replacing and not isinstance(present, Facade):
        raise ImportError(
            f"the real ray ({getattr(present, '__file__', None)}) is imported already in this process; "
            "hint: import hpcray.compat.ray first",
            name="ray",
        )
    if STANDIN not in sys.path:
        sys.path.insert(0, STANDIN)
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)
    if os.environ.get(LENT) and not FINDER.lent:
        lend(os.environ[LENT])
    os.environ.setdefault(VARIABLE, "1")
    if not isinstance(present, Facade):
        spec = FINDER.find_spec("ray")
        assert isinstance(spec, importlib.machinery.ModuleSpec)
        present = sys.modules["ray"] = FINDER.create_module(spec)
        FINDER.exec_module(present)
    return present


def installed() -> bool:
    """Whether `import ray` means hpcray in this process."""
    return FINDER in sys.meta_path
