"""`import ray` without Ray: its module names, served by hpcray.

There are three ways to call `install()`:

- `python -m hpcray --as-ray script.py`, which prepends the directory `STANDIN` to PYTHONPATH;
- `import hpcray.compat.ray` before the first `import ray`;
- the distribution "ray" from `pip install hpcray/compat/standin`, or `python -m hpcray.compat install`.

`STANDIN` contains a package `ray` that calls `install()`, and the metadata of a distribution "ray". The directory is on
the import path of the driver, and workers get that path.
"""

from __future__ import annotations

from hpcray.common.ray_version import RAY_VERSION, STANDIN
from hpcray.compat.finder import install, installed, lend

__all__ = ["RAY_VERSION", "STANDIN", "install", "installed", "lend"]
