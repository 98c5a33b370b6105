"""Collectives over the nodes' object stores: each rank puts what it has, and reads what it needs of the others.

On one node that is shared memory; between nodes objects travel as all objects do (UCX). Nothing listens anywhere. A
reduction of large arrays moves each byte twice, as a ring would: every rank reduces one part and puts the result.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcray.api.actor import get_actor
from hpcray.api.decorator import remote
from hpcray.api.objects import get, put
from hpcray.api.session import ensure
from hpcray.base.errors import GetTimeoutError, RayActorError
from hpcray.util.collective.meeting import Meeting
from hpcray.util.collective.types import ReduceOp

_SMALL = 1 << 15
_NAMESPACE = "hpcray.util.collective"
_AGAIN = 0.01
_POLL = 0.1

_REDUCE: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVERAGE: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


class StoreGroup:
    """One rank's membership in a group.

    Args:
        name: of the group.
        world_size, rank: as in MPI.
        timeout: seconds that the others may take to join, and to come to each operation.

    Raises:
        RuntimeError: the others did not join in time.
    """

    def __init__(self, name: str, world_size: int, rank: int, timeout: float) -> None:
        self.name, self.world_size, self.rank = name, world_size, rank
        self._timeout = timeout
        self._rounds = 0
        self._mails: dict[tuple[int, int], int] = {}
        self._meeting = self._found() if rank else self._opened()
        self._all("join", None)

    # ------------------------------------------------------------ meeting

    def _key(self) -> bytes:
        return self.name.encode()

    def _opened(self) -> Any:
        name = f"{self.name}-{uuid.uuid4().hex}"
        cls = remote(num_cpus=0, name=name, namespace=_NAMESPACE, max_concurrency=10_000)(Meeting)
        meeting = cls.remote(self.world_size)
        get(meeting.join.remote(0))
        ensure().gcs.call("kv_put", self._key(), name.encode(), True, _NAMESPACE)
        return meeting

    def _found(self) -> Any:
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            name = ensure().gcs.call("kv_get", self._key(), _NAMESPACE)
            if name is not None:
                try:
                    meeting = get_actor(name.decode(), _NAMESPACE)
                    if get(meeting.join.remote(self.rank)):
                        return meeting
                except (ValueError, RayActorError):
                    pass  # of an earlier group of this name
                time.sleep(_POLL)
            time.sleep(_AGAIN)
        raise RuntimeError(
            f"rank 0 of the collective group {self.name!r} did not come within {self._timeout:g} s, for which rank "
            f"{self.rank} of {self.world_size} waited; hint: all ranks call init_collective_group, at the same time"
        )

    def destroy(self) -> None:
        """Leave the group; rank 0 closes it."""
        if self.rank == 0 and ensure().gcs.call("kv_get", self._key(), _NAMESPACE) is not None:
            ensure().gcs.call("kv_del", self._key(), _NAMESPACE)
        self._meeting = None

    def _all(self, what: str, value: Any) -> list[Any]:
        """One round: what every rank brought."""
        self._rounds += 1
        key = [what, self._rounds]
        try:
            values: list[Any] = get(self._meeting.meet.remote(tuple(key), self.rank, value), timeout=self._timeout)
        except GetTimeoutError:
            late = get(self._meeting.missing.remote(tuple(key)))
            raise RuntimeError(
                f"{what} of the collective group {self.name!r}: ranks {late} of {self.world_size} did not come within "
                f"{self._timeout:g} s; hint: every rank has to call the same operations in the same order, "
                "gloo_timeout says how long they may take (ms)"
            ) from None
        except RayActorError as error:
            raise RuntimeError(
                f"{what}: the collective group {self.name!r} has ended, rank 0 has left it ({error})"
            ) from None
        return values

    # ------------------------------------------------------------ collectives, on contiguous arrays

    def barrier(self) -> None:
        """Wait for all."""
        self._all("barrier", None)

    def allgather(self, mine: Any) -> list[Any]:
        """What every rank has, by rank."""
        return self._values("allgather", self._sent(mine))

    def broadcast(self, mine: Any, root: int) -> Any:
        """What `root` has."""
        brought = self._all("broadcast", self._sent(mine) if self.rank == root else None)
        return self._read(brought[root])

    def allreduce(self, mine: Any, op: ReduceOp) -> Any:
        """One array made of those of all ranks, element by element; always in the order of the ranks."""
        if mine.nbytes <= _SMALL or self.world_size == 1:
            return self._reduced([self._read(item) for item in self._all("allreduce", self._sent(mine))], op)
        parts = np.array_split(mine.reshape(-1), self.world_size)
        part = self._scattered("allreduce", parts, op)
        brought = self._all("allreduce", self._sent(part))
        return np.concatenate([self._read(item) for item in brought]).reshape(mine.shape)

    def reduce(self, mine: Any, root: int, op: ReduceOp) -> Any:
        """The same for `root` alone; None for the others."""
        brought = self._all("reduce", self._sent(mine))
        return self._reduced([self._read(item) for item in brought], op) if self.rank == root else None

    def reducescatter(self, parts: list[Any], op: ReduceOp) -> Any:
        """Reduce each rank's part; this rank's."""
        return self._scattered("reducescatter", parts, op)

    def _scattered(self, what: str, parts: list[Any], op: ReduceOp) -> Any:
        brought = self._all(what, [self._sent(part) for part in parts])
        return self._reduced([self._read(row[self.rank]) for row in brought], op)

    def _values(self, what: str, sent: Any) -> list[Any]:
        return [self._read(item) for item in self._all(what, sent)]

    # ------------------------------------------------------------ one to one

    def send(self, mine: Any, to: int) -> None:
        """Leave an array for another rank. Returns before it is received."""
        get(self._meeting.post.remote(self._mail(self.rank, to), self._sent(mine)), timeout=self._timeout)

    def recv(self, source: int) -> Any:
        """The next array that `source` has sent here."""
        try:
            return self._read(get(self._meeting.take.remote(self._mail(source, self.rank)), timeout=self._timeout))
        except GetTimeoutError:
            raise RuntimeError(
                f"recv of the collective group {self.name!r}: rank {source} sent nothing to rank {self.rank} within "
                f"{self._timeout:g} s"
            ) from None

    def _mail(self, source: int, to: int) -> tuple[str, int, int, int]:
        number = self._mails[source, to] = self._mails.get((source, to), 0) + 1
        return "mail", source, to, number

    # ------------------------------------------------------------ arrays

    def _sent(self, array: Any) -> Any:
        """A small array itself, or [the ref of a large one]; a list, so that nobody fetches it on the way."""
        if array.nbytes <= _SMALL:
            return np.array(array)
        return [put(np.ascontiguousarray(array))]

    @staticmethod
    def _read(item: Any) -> Any:
        return get(item[0]) if isinstance(item, list) else item

    def _reduced(self, arrays: list[Any], op: ReduceOp) -> Any:
        total = np.array(arrays[0])
        for array in arrays[1:]:
            _REDUCE[op](total, array, out=total, casting="unsafe")
        if op is ReduceOp.AVERAGE:
            total = (total / len(arrays)).astype(total.dtype)
        return total
