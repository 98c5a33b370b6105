"""A progress bar for workers that counts silently and prints one line when it is closed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

RAY_TQDM_MAGIC = "__ray_tqdm_magic_token__"
_instances: list[tqdm] = []


class tqdm:
    """The subset of tqdm's interface that Ray's progress bar has. Workers have no terminal, so no bar is drawn.

    Args:
        iterable: items to iterate over.
        desc: prefix of the line.
        total: number of items; taken from `iterable` where it has a length.
        unit: name of an item.
        position, flush_interval_s: without effect.
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
        self._desc = desc

    def update(self, n: int = 1) -> None:
        """Add `n` to the count."""
        self._count += n
        self.n = self._count

    def refresh(self) -> None:
        """No effect."""

    def close(self) -> None:
        """Print the count, once."""
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
    """Print as `print` does; a progress bar of another process is not disturbed."""
    print(*args, **kwargs)
