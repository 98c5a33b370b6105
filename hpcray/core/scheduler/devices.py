"""Which GPU of a node holds how much of which claim. Exact units; indices into the node's list of device ids.

A fraction lives on one device, where it fits most tightly; a request of n whole GPUs gets n free ones, the first in the
list. Nothing is ever moved, so a node can have room in sum and none for a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcray.base.resources import ASSIGNED_GPUS, RUNTIME_ENV, UNIT, Resources

if TYPE_CHECKING:
    from hpcray.core.scheduler.queue import Env

GPU = "GPU"


class DeviceBook:
    """The devices of one node.

    Args:
        ids: opaque, as the vendor's variable takes them.
        share: units of one device that there are, where they are less than all of it.

    Attributes:
        free: units left on each device.
    """

    def __init__(self, ids: Sequence[str], share: int = UNIT) -> None:
        self.ids = tuple(ids)
        self._each = min(share, UNIT)
        self.free = [self._each] * len(self.ids)
        self._lasting = [0] * len(self.ids)

    def left(self) -> Resources:
        """Units left, by id."""
        return dict(zip(self.ids, self.free, strict=True))

    def possible(self, units: int) -> bool:
        """Whether a node that is empty could serve `units`: at most one device, or whole ones."""
        return _room([self._each] * len(self.ids), units)

    def reachable(self, units: int) -> bool:
        """Whether there would be room if all but actors ended."""
        return _room([self._each - held for held in self._lasting], units)

    def fits(self, units: int, aside: int = 0) -> bool:
        """Whether there is room now.

        Args:
            aside: units that another request waits for: as many of the emptiest devices are left to it.
        """
        kept = aside // UNIT
        return _room(sorted(self.free)[: len(self.free) - kept] if kept else self.free, units)

    def take(self, units: int, lasting: bool) -> tuple[int, ...]:
        """Hold `units`; the devices' indices.

        Args:
            lasting: for an actor.

        Raises:
            ValueError: there is no room; nothing is held.
        """
        if not self.fits(units):
            raise ValueError(f"{units} units of GPU do not fit into {self.free}")
        if units < UNIT:
            tightest = min((left, index) for index, left in enumerate(self.free) if left >= units)
            chosen: tuple[int, ...] = (tightest[1],)
        else:
            chosen = tuple([index for index, left in enumerate(self.free) if left == UNIT][: units // UNIT])
        self._book(chosen, units, lasting, -1)
        return chosen

    def give(self, chosen: Sequence[int], units: int, lasting: bool) -> None:
        """Free what `take` returned."""
        self._book(chosen, units, lasting, 1)

    def dress(self, env: Env, chosen: Sequence[int]) -> Env:
        """The environment of a worker that has these devices."""
        return (*env, (ASSIGNED_GPUS, ",".join(self.ids[index] for index in chosen)))

    def _book(self, chosen: Sequence[int], units: int, lasting: bool, sign: int) -> None:
        each = min(units, UNIT)
        for index in chosen:
            self.free[index] += sign * each
            if lasting:
                self._lasting[index] -= sign * each


def assigned(env: Env) -> frozenset[str]:
    """Ids of the devices that a worker with this environment has."""
    return frozenset(env[-1][1].split(",")) if env and env[-1][0] == ASSIGNED_GPUS else frozenset()


def slow(env: Env) -> bool:
    """Whether a worker needs time to set its environment up: packages to unpack, another Python to find or to make."""
    return any(name == RUNTIME_ENV for name, _ in env)


def undressed(env: Env) -> Env:
    """The environment that was asked for, without the devices."""
    return env[:-1] if env and env[-1][0] == ASSIGNED_GPUS else env


def _room(free: Sequence[int], units: int) -> bool:
    if units <= UNIT:
        return any(left >= units for left in free)
    return units % UNIT == 0 and sum(left == UNIT for left in free) >= units // UNIT
