"""Memory of the tensors that a process reads, used again when the program has dropped it.

Fresh memory costs more than the copy into it: the kernel finds pages, maps them and writes zeros. A program that reads
one value of a kind after another (weights, batches) needs as much each time. So each large storage (PyTorch's memory of
tensors) that was made for a copy is remembered for some seconds. The next copy of as many bytes goes into one that only
this cache still holds, by the reference counts of PyTorch and of Python. What is unused for a second is given back to
the system.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

REUSED_SIZE = 1 << 18
"""Bytes of a storage from which on it is remembered. The C library keeps smaller ones by itself."""
UNUSED_TIME = 1.0
"""Seconds for which unused memory is kept."""
LENT_TIME = 10.0
"""Seconds after which a storage that is still in use is forgotten. The program keeps it."""
_TRIM_INTERVAL = 0.5
_SCAN_INTERVAL = 0.005
"""Seconds between two scans for unused storages of one size. A value may have many, which are found by one scan."""


class _Block:
    """A storage of `size` bytes. unused: since when it is, as far as was seen; None: it is in use."""

    __slots__ = ("lent", "size", "storage", "unused")

    def __init__(self, size: int, storage: Any, now: float) -> None:
        self.size = size
        self.storage = storage
        self.lent = now
        self.unused: float | None = None


class StorageCache:
    """The storages of one process by size. Not safe for threads; time is an argument, in seconds.

    Args:
        is_unused: returns whether only this cache has the storage of a block; None: it was changed, and must not
            be used again.

    Attributes:
        budget: bytes that may be kept unused.
    """

    def __init__(self, budget: int, is_unused: Callable[[_Block], bool | None]) -> None:
        self.budget = budget
        self._is_unused = is_unused
        self._blocks: dict[int, list[_Block]] = {}
        self._unused: dict[int, list[_Block]] = {}
        self._scanned: dict[int, float] = {}
        self._lent = 0  # bytes since the last trimming

    def __len__(self) -> int:
        return sum(map(len, self._blocks.values()))

    def take(self, size: int, now: float) -> Any:
        """Return an unused storage of exactly `size` bytes, with whatever it holds; None: there is none."""
        unused = self._unused.get(size)
        if not unused:
            if size not in self._blocks or now - self._scanned.get(size, -_SCAN_INTERVAL) < _SCAN_INTERVAL:
                return None
            self._scanned[size] = now
            unused = self._unused[size] = [block for block in self._blocks[size] if self._is_unused(block)]
        while unused:
            block = unused.pop()
            if self._is_unused(block):
                block.lent, block.unused = now, None
                return block.storage
        return None

    def lend(self, size: int, storage: Any, now: float) -> None:
        """Remember a storage that was made for a copy."""
        self._blocks.setdefault(size, []).append(_Block(size, storage, now))
        self._lent += size
        if self._lent > self.budget // 4:  # a program that reads values of ever other sizes
            self.trim(now)

    def trim(self, now: float) -> None:
        """Give back what is unused for a while, or beyond the budget; forget what stays in use."""
        kept, room = list[_Block](), self.budget
        for blocks in self._blocks.values():
            for block in blocks:
                unused = self._is_unused(block)
                if unused is None:
                    continue
                if not unused:
                    block.unused = None
                elif block.unused is None:
                    block.unused = now
                since, most = (block.lent, LENT_TIME) if block.unused is None else (block.unused, UNUSED_TIME)
                if now - since < most:
                    kept.append(block)
        kept.sort(key=lambda block: -block.lent)
        self.clear()
        for block in kept:
            if block.unused is not None:
                room -= block.size
                if room < 0:
                    continue
            self._blocks.setdefault(block.size, []).append(block)

    def clear(self) -> None:
        """Forget all of them; give back the unused ones."""
        self._blocks, self._unused, self._scanned = {}, {}, {}
        self._lent = 0


def _is_unused(use_count: Callable[[int], int], block: _Block) -> bool | None:
    """Return whether only the cache has a storage; None: it is not as it was made. Other processes may map its memory
    then, and a NumPy array of it has set that it cannot be resized."""
    storage = block.storage
    if storage.is_shared() or not storage.resizable() or storage.nbytes() != block.size:
        return None
    # Counted are: the block, `storage`, and the argument of the call.
    return sys.getrefcount(storage) == _OWN_REFS and use_count(storage._cdata) == 1


class _Probe:
    """Measures how many references the interpreter counts where `_is_unused` looks."""

    def __init__(self) -> None:
        self.storage = object()

    def count(self) -> int:
        storage = self.storage
        return sys.getrefcount(storage)


_OWN_REFS = _Probe().count()


class Storages:
    """The storages of this process: new ones, and those of its cache, which a thread trims while there are any."""

    def __init__(self) -> None:
        self._budgets: list[Callable[[], int]] = []
        self._forked()

    def _forked(self) -> None:
        self._lock = threading.Lock()
        self._cache: StorageCache | None = None
        self._thread: threading.Thread | None = None

    def keep(self, budget: Callable[[], int]) -> None:
        """Keep so many bytes that are unused; `budget` is called when they are known to be needed. 0: none."""
        self._budgets[:] = [budget]
        self._forked()

    def take(self, size: int) -> tuple[Any, bool]:
        """Return a storage of `size` bytes with any content, and whether its memory is fresh.

        Never waits: a destructor that the trimming thread happens to run may read tensors, too.
        """
        import torch

        if size < REUSED_SIZE or not self._lock.acquire(blocking=False):
            return torch.empty(size, dtype=torch.uint8, device="cpu").untyped_storage(), True
        try:
            cache = self._cache
            if cache is None:
                # PyTorch's own name for it is private. Where it is missing, nothing is used again.
                use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
                budget = self._budgets[-1]() if self._budgets and use_count is not None else 0
                cache = self._cache = StorageCache(budget, partial(_is_unused, use_count or (lambda _: 0)))
            found = cache.take(size, monotonic())
            if found is not None:
                return found, False
            found = torch.empty(size, dtype=torch.uint8, device="cpu").untyped_storage()
            if size <= cache.budget:
                cache.lend(size, found, monotonic())
                self._trim_later(cache)
            return found, True
        finally:
            self._lock.release()

    def _trim_later(self, cache: StorageCache) -> None:
        """Have the cache trimmed from now on (lock held)."""
        if self._thread is None:
            thread = threading.Thread(target=self._trim, args=(cache,), name="hpcray-tensor-memory", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # a limit on threads, or the interpreter ends
                cache.clear()
            else:
                self._thread = thread

    def _trim(self, cache: StorageCache) -> None:
        wait = threading.Event().wait
        while True:
            wait(_TRIM_INTERVAL)
            with self._lock:
                if self._cache is not cache:
                    return
                cache.trim(monotonic())
                if not cache:
                    self._thread = None
                    return


storages = Storages()
os.register_at_fork(after_in_child=storages._forked)
