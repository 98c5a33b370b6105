"""How many threads numerical libraries of a worker start: as many as its task or actor has CPUs, as in Ray.

`OMP_NUM_THREADS` counts for libraries that are loaded from now on. Those that the template process has loaded, such as
numpy, hear of it through threadpoolctl. Where the user has set the variable, all of this leaves it alone.
"""

from __future__ import annotations

import os

from hpcray.base.resources import UNIT
from hpcray.host.binding import fit_cores

OMP = "OMP_NUM_THREADS"


class _Set:
    """For how many CPUs we were asked last; what we have set: the variable, and the threads of loaded libraries."""

    cpus = 0
    text: str | None = None
    loaded = 1


def one_each() -> None:
    """What this process has loaded uses one thread from now on, here and in what it forks. For the template process."""
    if OMP not in os.environ:
        import threadpoolctl

        threadpoolctl.threadpool_limits(limits=1)


def changes(units: int) -> bool:
    """Whether `use_cpus(units)` has to be called: what was asked for last is something else."""
    before, _Set.cpus = _Set.cpus, max(1, units // UNIT)
    return before != _Set.cpus


def use_cpus(units: int) -> None:
    """Let a task or actor with `units` of CPU have its threads, and cores for them. Call it in the thread that will run
    it: libraries take a number that another thread sets for that thread's alone.
    """
    count = _Set.cpus = max(1, units // UNIT)
    fit_cores(count)
    known = os.environ.get(OMP)
    if known is not None and known != _Set.text:
        return  # the user's
    if known != str(count):
        _Set.text = os.environ[OMP] = str(count)
    if count != _Set.loaded:
        import threadpoolctl

        threadpoolctl.threadpool_limits(limits=count)
        _Set.loaded = count
