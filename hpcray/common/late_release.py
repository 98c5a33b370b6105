"""Destructors of objects that the garbage collector finds in a reference cycle, but that may still be used.

Python calls `__del__` of all objects of a cycle before it takes any of them apart. The destructor of another object may
read a ref of ours after that, or save it for later, and `__del__` is not called a second time. So what an object of
ours releases in `__del__` is released when its memory is freed: such an object then gets a `LateRelease`, which the
garbage collector does not see, and whose destructor runs with the end of its owner.

Source: PEP 442, Safe object finalization.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from sys import getrefcount

collecting: list[bool] = []
"""Not empty while the garbage collector is at work, in whatever thread (`interruptions`)."""

_calls: dict[bytes, Callable[[], object]] = {}
_numbers = itertools.count()


class LateRelease(bytes):
    """Makes a call when it is freed. Its type has no room for references, so the collector never finalizes it."""

    __slots__ = ()

    @classmethod
    def of(cls, call: Callable[[], object]) -> LateRelease:
        """Return an object that makes `call` when it is freed. The call must not refer to the owner."""
        made = cls(next(_numbers).to_bytes(8, "big"))
        _calls[made[:]] = call
        return made

    def __del__(self) -> None:
        call = _calls.pop(self[:], None)
        if call is not None:
            call()


def is_referred(owner: object) -> bool:
    """Return True if anything refers to `owner`, whose `__del__` calls this with its own argument."""
    return getrefcount(owner) > _ALONE


class _Probe:
    count = 0

    def __del__(self) -> None:
        _Probe.count = _count(self)


def _count(owner: object) -> int:
    return getrefcount(owner)


_Probe()
_ALONE = _Probe.count
"""The count of `is_referred` for an object to which nothing refers."""
