"""Reading ahead from disk: who reads objects in the order in which they were written will soon want the next ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpcray.core.store.objects import State, StoredObject

WINDOW = 64 << 20
"""Bytes that are read ahead of one reader, where the store is large enough."""
_SHARE = 16  # of a small store
_READERS = 16  # that are told apart
_GAP = 16  # objects that are gone may lie between two


@dataclass(slots=True)
class _Course:
    """A reader that goes on from one object to the next. until: what comes before this number was read ahead, or is in
    memory anyhow; steps: objects that it has asked for."""

    until: int
    steps: int = 0


class ReadAhead:
    """Follows the readers of one store; two objects in a row make a course.

    Args:
        size: bytes of the store.
        on_disk: the objects on disk, by the number of their slot: the order in which they were written.

    Attributes:
        window: bytes that are read ahead of one reader.
    """

    def __init__(self, size: int, on_disk: Mapping[int, StoredObject]) -> None:
        self.window = min(WINDOW, size // _SHARE)
        self._on_disk = on_disk
        self._courses: dict[int, _Course] = {}

    def asked(self, obj: StoredObject, restore: Callable[[StoredObject], bool]) -> None:
        """Somebody wants an object that is on disk, and perhaps in memory too.

        Args:
            restore: reads another one back; False: there is no room for it now.
        """
        assert obj.disk is not None
        number = obj.disk.number
        course = self._courses.pop(number, None)
        following = self._next(number)
        if following < 0 or (course is None and following in self._courses):
            return
        if course is None:
            course = _Course(following)
        course.until = max(course.until, following)
        course.steps += 1
        self._courses[following] = course
        if len(self._courses) > _READERS:
            del self._courses[next(iter(self._courses))]
        if course.steps > 1:
            self._advance(course, following, restore)

    def _advance(self, course: _Course, start: int, restore: Callable[[StoredObject], bool]) -> None:
        known = (self._on_disk.get(number) for number in range(start, course.until))
        ahead = sum(obj.size for obj in known if obj is not None)
        while True:
            obj = self._on_disk.get(course.until)
            if obj is not None:
                ahead += obj.size
                if ahead > self.window or (obj.state is State.SPILLED and not restore(obj)):
                    return
            course.until = max(course.until + 1, self._next(course.until))
            if course.until not in self._on_disk:
                return

    def _next(self, number: int) -> int:
        """The object written after this one; -1: none in sight."""
        return next((at for at in range(number + 1, number + 1 + _GAP) if at in self._on_disk), -1)
