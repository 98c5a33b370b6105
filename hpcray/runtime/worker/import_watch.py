"""Large modules that a worker imports: its raylet has them imported ahead of later workers."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import islice
from time import monotonic

from hpcray.common.ids import raylet_of
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.core_worker import CoreWorker

_LARGE = 100
"""Modules in a package from which on it is large."""
_FIRST_LOOK, _LAST_LOOK = 0.5, 40.0
"""Seconds until the first look after a function or class was loaded, and until the last; each takes twice as long."""


class ImportWatch:
    """Looks at what this worker has imported, some times after each load of a function or class. Costs nothing else."""

    def __init__(self, process: CoreWorker) -> None:
        self._process = process
        self._seen = len(sys.modules)  # their names are in memory that workers share until they look at them
        self._reported: set[str] = set()
        self._pause = 0.0
        self._on = process.config.learn_imports

    def loaded(self) -> None:
        """Note that user code was loaded: it may import something soon (lock not held)."""
        if not self._on:
            return
        with self._process.engine.lock:
            waits, self._pause = bool(self._pause), _FIRST_LOOK
            if not waits:
                self._look_later()

    def _look_later(self) -> None:
        self._process.engine.add_timer(monotonic() + self._pause, lambda now: self._look())

    def _look(self) -> None:
        """Report what is new, and large (lock held)."""
        fresh = list(islice(reversed(sys.modules), max(0, len(sys.modules) - self._seen)))
        large: list[tuple[str, str]] = []
        for name, count in Counter(name.partition(".")[0] for name in fresh).items():
            file = getattr(sys.modules.get(name), "__file__", None)
            if count >= _LARGE and name not in self._reported and isinstance(file, str):
                large.append((name, file))
        if large:
            self._reported.update(name for name, _ in large)
            self._process.engine.send(raylet_of(self._process.node), m.ModulesImported(large))
            self._process.engine.flush()
        self._pause *= 2
        if self._pause <= _LAST_LOOK:
            self._look_later()
        else:
            self._pause = 0.0
