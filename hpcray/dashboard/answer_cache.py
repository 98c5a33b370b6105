"""Answers about a job that is looked at: each is gathered once for all browsers that ask at about the same time."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

_MOST_ANSWERS = 128
_IDLE_SHARE = 9.0
"""An answer that took a second to gather serves for so many more: gathering takes at most a tenth of the time."""


class NoAnswerError(Exception):
    """The job has not answered within the time."""


@dataclass
class _Answer:
    value: Any
    until: float


class AnswerCache:
    """Gathers answers in threads, of which a job that does not answer can hold only so many.

    All methods are called on the event loop.

    Args:
        threads: how many gather at once.
        patience: seconds after which `get` raises.
    """

    def __init__(self, threads: int = 8, patience: float = 15.0) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="dashboard")
        self._patience = patience
        self._answers: OrderedDict[Hashable, _Answer] = OrderedDict()
        self._running: dict[Hashable, asyncio.Future[Any]] = {}
        self._closed = False

    async def get(self, key: Hashable, gather: Callable[[], Any], fresh: float, more: float = 0.0) -> Any:
        """Return the answer to a question: one that is there already, or that is being gathered, or a new one.

        Args:
            key: of the question.
            gather: called in a thread.
            fresh: seconds for which its answer serves others.
            more: seconds that it may take beyond the usual ones.

        Raises:
            NoAnswerError: there is none in time. Exception: what `gather` raised.
        """
        known = self._answers.get(key)
        if known is not None and time.monotonic() < known.until:
            self._answers.move_to_end(key)
            return known.value
        running = self._running.get(key)
        if running is None:
            loop = asyncio.get_running_loop()
            running = self._running[key] = loop.run_in_executor(self._threads, gather)
            running.add_done_callback(partial(self._gathered, key, fresh, time.monotonic()))
        try:
            return await asyncio.wait_for(asyncio.shield(running), self._patience + more)
        except asyncio.CancelledError:
            if not self._closed:
                raise
            raise NoAnswerError("the dashboard has ended") from None
        except asyncio.TimeoutError:
            raise NoAnswerError(f"the job has not answered within {self._patience + more:g} s; still trying") from None

    def forget(self, key: Hashable) -> None:
        """Have the next one who asks get a new answer."""
        self._answers.pop(key, None)

    def close(self) -> None:
        """Gather no more: who waits gets an error. What is being gathered ends with the connection to the job."""
        self._closed = True
        for running in list(self._running.values()):
            running.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _gathered(self, key: Hashable, fresh: float, began: float, future: asyncio.Future[Any]) -> None:
        self._running.pop(key, None)
        if future.cancelled() or future.exception() is not None:
            return
        now = time.monotonic()
        self._answers[key] = _Answer(future.result(), now + max(fresh, _IDLE_SHARE * (now - began)))
        self._answers.move_to_end(key)
        while len(self._answers) > _MOST_ANSWERS:
            self._answers.popitem(last=False)
