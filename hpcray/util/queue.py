"""A first-in-first-out queue that tasks, actors and drivers share. An actor holds its items."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Awaitable, Iterable
from typing import Any

from hpcray.api.actor import ActorHandle
from hpcray.api.decorator import remote
from hpcray.api.objects import cancel, get
from hpcray.common.exceptions import ActorDiedError, RayError
from hpcray.runtime.core_worker.object_refs import ObjectRef
from hpcray.util.actor_pool import end_actors


class Empty(queue.Empty):
    """The queue has fewer items than requested."""


class Full(queue.Full):
    """The queue has no room for the items."""


class Queue:
    """A queue for many producers and consumers in the job. Copies of the object, pickled ones too, are the same queue.

    Args:
        maxsize: largest number of items; 0 for no limit.
        actor_options: options of its actor, for example `{"num_cpus": 1}` or a name.
    """

    def __init__(self, maxsize: int = 0, actor_options: dict[str, Any] | None = None) -> None:
        self.maxsize = maxsize
        self.actor: ActorHandle | None = remote(_QueueActor).options(**(actor_options or {})).remote(maxsize)

    def __len__(self) -> int:
        return self.size()

    def size(self) -> int:
        """Return the number of items."""
        return int(get(self._live().qsize.remote()))

    qsize = size

    def empty(self) -> bool:
        """Return True if the queue has no items."""
        return bool(get(self._live().empty.remote()))

    def full(self) -> bool:
        """Return True if the queue has `maxsize` items."""
        return bool(get(self._live().full.remote()))

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add an item.

        Args:
            item: the item.
            block: wait for room.
            timeout: seconds to wait; None for no limit.

        Raises:
            Full: the queue has no room, or got none within `timeout`. ValueError: `timeout` is negative.
            RayActorError: the actor of the queue has died.
        """
        if not block:
            self.put_nowait(item)
            return
        _check(timeout)
        _outcome(self._live().put.remote(item, timeout))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take the oldest item.

        Args:
            block: wait for an item.
            timeout: seconds to wait; None for no limit.

        Raises:
            Empty: the queue has no item, or got none within `timeout`. ValueError: `timeout` is negative.
            RayActorError: the actor of the queue has died.
        """
        if not block:
            return self.get_nowait()
        _check(timeout)
        return _outcome(self._live().get.remote(timeout))

    async def put_async(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """`put` for coroutines."""
        _check(timeout)
        actor = self._live()
        await _awaited(actor.put.remote(item, timeout) if block else actor.put_nowait.remote(item))

    async def get_async(self, block: bool = True, timeout: float | None = None) -> Any:
        """`get` for coroutines."""
        _check(timeout)
        actor = self._live()
        return await _awaited(actor.get.remote(timeout) if block else actor.get_nowait.remote())

    def put_nowait(self, item: Any) -> None:
        """Add an item if there is room, else raise `Full`."""
        _outcome(self._live().put_nowait.remote(item))

    def put_nowait_batch(self, items: Iterable[Any]) -> None:
        """Add all items if there is room for all of them, else raise `Full` and add none.

        Raises:
            TypeError: `items` is not iterable.
        """
        if not isinstance(items, Iterable):
            raise TypeError("Argument 'items' must be an Iterable")
        _outcome(self._live().put_nowait_batch.remote(list(items)))

    def get_nowait(self) -> Any:
        """Take the oldest item if there is one, else raise `Empty`."""
        return _outcome(self._live().get_nowait.remote())

    def get_nowait_batch(self, num_items: int) -> list[Any]:
        """Take the oldest `num_items` items if there are so many, else raise `Empty` and take none.

        Raises:
            TypeError: `num_items` is no int. ValueError: `num_items` is negative.
        """
        if not isinstance(num_items, int):
            raise TypeError("Argument 'num_items' must be an int")
        if num_items < 0:
            raise ValueError("'num_items' must be nonnegative")
        items: list[Any] = _outcome(self._live().get_nowait_batch.remote(num_items))
        return items

    def shutdown(self, force: bool = False, grace_period_s: float = 5) -> None:
        """End the actor of the queue, and drop the items.

        Args:
            force: kill the actor at once.
            grace_period_s: seconds after which an actor that has not ended is killed.
        """
        if self.actor is not None:
            end_actors([self.actor], 0 if force else grace_period_s)
        self.actor = None

    def _live(self) -> ActorHandle:
        if self.actor is None:
            raise ActorDiedError("the queue was shut down; hint: make a new Queue")
        return self.actor


class _QueueActor:
    def __init__(self, maxsize: int) -> None:
        self.maxsize = maxsize
        self.queue: asyncio.Queue[Any] = asyncio.Queue(maxsize)

    def qsize(self) -> int:
        return self.queue.qsize()

    def empty(self) -> bool:
        return self.queue.empty()

    def full(self) -> bool:
        return self.queue.full()

    async def put(self, item: Any, timeout: float | None = None) -> None:
        if timeout == 0:  # before Python 3.12 wait_for does not try at all
            return self.put_nowait(item)
        try:
            return await asyncio.wait_for(self.queue.put(item), timeout)
        except asyncio.TimeoutError:
            raise Full(f"no room within {timeout:g} s: {self.maxsize} items") from None

    async def get(self, timeout: float | None = None) -> Any:
        if timeout == 0:
            return self.get_nowait()
        try:
            return await asyncio.wait_for(self.queue.get(), timeout)
        except asyncio.TimeoutError:
            raise Empty(f"no item within {timeout:g} s") from None

    def put_nowait(self, item: Any) -> None:
        self.queue.put_nowait(item)

    def get_nowait(self) -> Any:
        return self.queue.get_nowait()

    def put_nowait_batch(self, items: list[Any]) -> None:
        if self.maxsize > 0 and len(items) + self.qsize() > self.maxsize:
            raise Full(f"Cannot add {len(items)} items to queue of size {self.qsize()} and maxsize {self.maxsize}.")
        for item in items:
            self.queue.put_nowait(item)

    def get_nowait_batch(self, num_items: int) -> list[Any]:
        if num_items > self.qsize():
            raise Empty(f"Cannot get {num_items} items from queue of size {self.qsize()}.")
        return [self.queue.get_nowait() for _ in range(num_items)]


def _check(timeout: float | None) -> None:
    if timeout is not None and timeout < 0:
        raise ValueError("'timeout' must be a non-negative number")


def _outcome(ref: ObjectRef[Any]) -> Any:
    try:
        return get(ref)
    except (asyncio.QueueEmpty, asyncio.QueueFull, Empty, Full) as error:
        raise _plain(error) from None
    except RayError:
        raise
    except BaseException:  # Ctrl-C: a caller that has stopped waiting must not take an item
        cancel(ref)
        raise


async def _awaited(ref: Awaitable[Any]) -> Any:
    try:
        return await ref
    except (asyncio.QueueEmpty, asyncio.QueueFull, Empty, Full) as error:
        raise _plain(error) from None
    except asyncio.CancelledError:
        assert isinstance(ref, ObjectRef)
        cancel(ref)
        raise


def _plain(error: Exception) -> Empty | Full:
    """Convert a task error to a plain `Empty` or `Full`, without the remote traceback."""
    kind = Full if isinstance(error, (asyncio.QueueFull, Full)) else Empty
    cause = getattr(error, "cause", error)
    return kind(*cause.args)
