"""Where the ranks of a group meet: an actor that gives each what the others brought.

What it hands around is small: values of some KB, or refs of objects that stay in the nodes' stores.
"""

from __future__ import annotations

import asyncio
from typing import Any


class Meeting:
    """One per group.

    Args:
        size: how many ranks there are.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._joined: set[int] = set()
        self._rounds: dict[Any, dict[int, Any]] = {}
        self._full: dict[Any, asyncio.Event] = {}
        self._left: dict[Any, int] = {}
        self._mail: dict[Any, asyncio.Queue[Any]] = {}

    async def join(self, rank: int) -> bool:
        """Whether this rank is new here. One that is not has come to the meeting of an earlier group."""
        new = rank not in self._joined
        self._joined.add(rank)
        return new

    async def meet(self, key: Any, rank: int, value: Any) -> list[Any]:
        """Bring a value to a round; when all ranks have, get those of all, by rank."""
        brought = self._rounds.setdefault(key, {})
        full = self._full.setdefault(key, asyncio.Event())
        brought[rank] = value
        if len(brought) == self._size:
            full.set()
        await full.wait()
        values = [brought[each] for each in range(self._size)]
        self._left[key] = self._left.get(key, 0) + 1
        if self._left[key] == self._size:
            for book in (self._rounds, self._full, self._left):
                del book[key]
        return values

    async def missing(self, key: Any) -> list[int]:
        """The ranks that have not come to a round."""
        return [rank for rank in range(self._size) if rank not in self._rounds.get(key, {})]

    async def post(self, key: Any, value: Any) -> None:
        """Leave a value for one rank."""
        self._mail.setdefault(key, asyncio.Queue()).put_nowait(value)

    async def take(self, key: Any) -> Any:
        """Get what was left, in the order in which it was; waits for it."""
        return await self._mail.setdefault(key, asyncio.Queue()).get()
