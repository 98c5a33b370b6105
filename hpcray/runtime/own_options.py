"""Options that few tasks and calls have. They travel in a message of their own: the others do not pay for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpcray.core.owner.tasks import Task
from hpcray.wire import messages as m


@dataclass(frozen=True)
class Own:
    """What one task or call has of its own.

    name: for people, "" means that of the function. group: concurrency group, "" means the method's. stream: what it
    yields is sent as it comes, `window` values ahead at most (-1: any number); dynamic: all of it is one return value.
    retry_exceptions: True (all), False (none) or the classes that are worth another try; of calls only.
    """

    name: str = ""
    group: str = ""
    retry_exceptions: Any = False
    stream: bool = False
    dynamic: bool = False
    window: int = -1

    def __bool__(self) -> bool:
        """Whether there is anything at all."""
        return bool(self.name or self.group or self.retry_exceptions or self.stream)


class OwnTask(Task):
    """A task with options of its own. Its `slots` are never None: that leads it off the fast path."""

    __slots__ = ("own",)
    own: Own

    def announcement(self, skip: int, want: list[int] | None) -> m.CallOptions:
        """What the worker must know before the task comes. skip: values of a stream that came already; want: the
        returns that are wanted, None for all."""
        return m.CallOptions(self.id, self.own.name, self.own.group, skip, self.own.window, want)
