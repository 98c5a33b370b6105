"""Memory for large values of channels: written by one process, read in place by others, used again when all are done.

A file begins with a line (64 bytes) for each reader, whose first word is the number of the last use that the reader has
let go of. Readers let go when no array is left that views the memory, so a value stays as it is while it is in use,
whatever is written meanwhile: that goes to other memory.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from hpcray.graphs.channel_memory import LINE, MASK, PAGE, WORD, MappedFile

_serials = itertools.count(1)


class _Block:
    """A file of the writer's. use: the number of the value that it holds or held last."""

    __slots__ = ("file", "serial", "size", "use")

    def __init__(self, readers: int, size: int) -> None:
        self.serial = next(_serials)
        self.use = 0
        self.size = -(-size // PAGE) * PAGE
        self.file = MappedFile.create(_head(readers) + self.size)


class ValueMemory:
    """The writer's blocks, as many as values are in use at a time.

    Args:
        readers: how many read each value.
    """

    def __init__(self, readers: int) -> None:
        self._readers = readers
        self._blocks: list[_Block] = []

    def take(self, size: int) -> tuple[tuple[int, int, int, int], memoryview]:
        """Find memory for a value that no reader uses.

        Returns:
            What readers must know (for `ValueViews.view`), and the memory.
        """
        free = [block for block in self._blocks if self._is_free(block)]
        block = min((block for block in free if block.size >= size), key=lambda block: block.size, default=None)
        if block is None:
            for small in free:
                self._blocks.remove(small)
            block = _Block(self._readers, size)
            self._blocks.append(block)
        block.use += 1
        _, fd, whole = block.file.place
        head = _head(self._readers)
        return (block.serial << 32 | block.use & MASK, fd, whole, size), block.file.view[head : head + size]

    def _is_free(self, block: _Block) -> bool:
        words = block.file.words
        return all(words[reader * LINE // WORD] == block.use & MASK for reader in range(self._readers))


class ValueViews:
    """The blocks of one writer as one of its readers sees them.

    Args:
        pid: the writer. readers: how many there are. reader: which one this is. kept: blocks that stay mapped.
    """

    def __init__(self, pid: int, readers: int, reader: int, kept: int) -> None:
        self._pid, self._head, self._word, self._kept = pid, _head(readers), reader * LINE // WORD, kept
        self._files: OrderedDict[int, MappedFile] = OrderedDict()

    def view(self, header: tuple[int, int, int, int]) -> memoryview:
        """Return the memory of a value, which is let go of when no view of it is left.

        Raises:
            OSError: the writer has ended.
        """
        use, fd, whole, size = header
        serial = use >> 32
        file = self._files.get(serial)
        if file is None:
            file = self._files[serial] = MappedFile.open(self._pid, fd, whole)
            if len(self._files) > self._kept:
                self._files.popitem(last=False)
        else:
            self._files.move_to_end(serial)
        array = (ctypes.c_char * size).from_buffer(file.map, self._head)
        _watch(array, _Release(file.words, self._word, use & MASK))
        return memoryview(array).cast("B")


class _Release:
    __slots__ = ("_use", "_word", "_words")

    def __init__(self, words: memoryview, word: int, use: int) -> None:
        self._words, self._word, self._use = words, word, use

    def __call__(self) -> None:
        self._words[self._word] = self._use


_watched: dict[int, tuple[Any, Callable[[], None]]] = {}


def _watch(array: Any, on_dead: Callable[[], None]) -> None:
    # `weakref.finalize` would do the same, and call what is left when the interpreter ends.
    ref = weakref.ref(array, _reap)
    _watched[id(ref)] = (ref, on_dead)


def _reap(ref: Any) -> None:
    found = _watched.pop(id(ref), None)
    if found is not None:
        found[1]()


def _head(readers: int) -> int:
    return -(-readers * LINE // PAGE) * PAGE
