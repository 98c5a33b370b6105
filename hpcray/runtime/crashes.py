"""Whether a task whose worker died is over, and in which error; lack of memory is counted by itself, as in Ray."""

from __future__ import annotations

from hpcray.base.deaths import out_of_memory
from hpcray.base.errors import ActorDiedError, OutOfMemoryError, RayError, WorkerCrashedError
from hpcray.core.owner.tasks import Task


class Crashes:
    """The tasks of one process whose workers died.

    Args:
        oom_retries: how often a task that may run again does so after lack of memory; -1: always. These do not count
            against its `max_retries`.
    """

    def __init__(self, oom_retries: int) -> None:
        self._limit = oom_retries
        self._counts: dict[bytes, int] = {}

    def ended(self, task: bytes) -> None:
        """A task that had run more than once is over."""
        self._counts.pop(task, None)

    def verdict(self, task: Task, where: str, reason: str) -> RayError | None:
        """The error in which a task ends that was running; None: it is to run again.

        Args:
            task: its `retries` are those left. where: the worker, for people. reason: how that died.
        """
        told = out_of_memory(reason)
        if not told:
            text = (
                f"The worker died unexpectedly while executing this task. The worker that ran {task.name!r} died: "
                f"{reason or where}"
            )
            return WorkerCrashedError(text) if task.retries == 0 else None
        count = self._counts.pop(task.id, 0)
        if task.retries == 0 or 0 <= self._limit <= count:
            return OutOfMemoryError(f"{told}\nThe task is {task.name!r}; it ran {count + 1} times")
        self._counts[task.id] = count + 1
        if task.retries > 0:
            task.retries += 1  # the next run takes one
        return None


def actor_error(actor: bytes, class_name: str, reason: str) -> RayError:
    """The error of a call to an actor that is dead for this reason."""
    told = out_of_memory(reason)
    if told:
        return OutOfMemoryError(f"{told}\nThe actor is {class_name} {actor.hex()}")
    return ActorDiedError(reason, actor_id=actor.hex(), class_name=class_name)
