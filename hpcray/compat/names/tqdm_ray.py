"""`ray.experimental.tqdm_ray`: a progress bar for workers. Here it counts, and says so only at its end."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

_instances: list[tqdm] = []


class tqdm:
    """The part of tqdm's interface that Ray's has. A bar of a worker would need a terminal: one line is printed.

    Args:
        iterable: what to go over. desc: said in front. total: how many there will be. unit: of what.
    """

    def __init__(
        self,
        iterable: Iterable[Any] | None = None,
        desc: str | None = None,
        total: int | None = None,
        unit: str | None = None,
        position: int | None = None,
        flush_interval_s: float | None = None,
    ) -> None:
        if total is None and hasattr(iterable, "__len__"):
            total = len(iterable)  # type: ignore[arg-type]
        self._iterable, self._desc, self._total, self._unit = iterable, desc or "", total, unit or "it"
        self._count, self._closed = 0, False
        self.n = 0

    def set_description(self, desc: str) -> None:
        """Say something else in front."""
        self._desc = desc

    def update(self, n: int = 1) -> None:
        """Count."""
        self._count += n
        self.n = self._count

    def refresh(self) -> None:
        """Nothing is drawn."""

    def close(self) -> None:
        """Say how many there were."""
        if not self._closed:
            self._closed = True
            of = f"/{self._total}" if self._total is not None else ""
            print(f"{self._desc}: {self._count}{of} {self._unit}", file=sys.stderr)

    def __iter__(self) -> Iterator[Any]:
        if self._iterable is None:
            raise ValueError("No iterable provided")
        for item in self._iterable:
            self.update()
            yield item
        self.close()


def safe_print(*args: Any, **kwargs: Any) -> None:
    """`print`."""
    print(*args, **kwargs)
