"""How the ranks of a group find each other (`Membership`), and collectives over the object stores (`StoreGroup`)."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import uuid
from collections.abc import Callable
from enum import Enum
from typing import Any, cast

import numpy as np

from hpcray.api.actor import get_actor
from hpcray.api.decorator import remote
from hpcray.api.objects import get, put
from hpcray.api.runtime_context import get_runtime_context
from hpcray.api.session import require_session
from hpcray.common.exceptions import GetTimeoutError, RayActorError
from hpcray.protocol.serialization import has_buffers

_INLINE_LIMIT = 1 << 15  # bytes; larger arrays go through the object store
_NAMESPACE = "hpcray.util.collective"
_KEY_POLL_INTERVAL = 0.01  # seconds
_ACTOR_POLL_INTERVAL = 0.1  # seconds
_FIRST_LOOK, _LONGEST_LOOK = 1.0, 8.0  # seconds of waiting until the other ranks are looked at, and between such looks


class ReduceOp(Enum):
    """Reduction operations."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    AVERAGE = 4


_REDUCE: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVERAGE: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


class Rendezvous:
    """Actor through which the ranks of one group exchange small values: at most some KB each, or refs of objects.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._members: dict[int, bytes] = {}
        self._problem = ""
        self._rounds: dict[Any, dict[int, Any]] = {}
        self._full: dict[Any, asyncio.Event] = {}
        self._left: dict[Any, int] = {}
        self._mail: dict[Any, asyncio.Queue[Any]] = {}

    async def join(self, rank: int, process: bytes) -> bool:
        """Register a rank. Returns False for a rank that is registered: it found the rendezvous of an earlier group.

        Args:
            process: the id of the actor's process; b"" for a rank that is no actor.
        """
        new = rank not in self._members
        self._members.setdefault(rank, process)
        return new

    async def exchange(self, key: Any, rank: int, value: Any) -> list[Any] | str:
        """Contribute a value to a round. Returns the values of all ranks, by rank, when all have contributed; the
        reason why they never will, once `fail` was called."""
        values = self._rounds.setdefault(key, {})
        full = self._full.setdefault(key, asyncio.Event())
        values[rank] = value
        if len(values) == self._size or self._problem:
            full.set()
        await full.wait()
        if len(values) < self._size:
            return self._problem
        result = [values[each] for each in range(self._size)]
        self._left[key] = self._left.get(key, 0) + 1
        if self._left[key] == self._size:
            for rounds in (self._rounds, self._full, self._left):
                del rounds[key]
        return result

    async def missing(self, key: Any) -> list[int]:
        """Return the ranks that have not contributed to a round."""
        return [rank for rank in range(self._size) if rank not in self._rounds.get(key, {})]

    async def processes(self, ranks: list[int]) -> dict[int, bytes]:
        """Return the processes of ranks, as far as `join` was given one."""
        return {rank: process for rank in ranks if (process := self._members.get(rank))}

    async def fail(self, problem: str) -> None:
        """Rounds that are not complete never will be."""
        self._problem = problem
        for full in self._full.values():
            full.set()

    async def post(self, key: Any, value: Any) -> None:
        """Store a value for one rank."""
        self._mail.setdefault(key, asyncio.Queue()).put_nowait(value)

    async def take(self, key: Any) -> Any:
        """Wait for the next stored value, in the order of `post`."""
        return await self._mail.setdefault(key, asyncio.Queue()).get()


class Membership:
    """One rank's place in a group, and the rendezvous through which its ranks exchange small values.

    Args:
        name: name of the group.
        world_size, rank: as in MPI.
        timeout: seconds that the other ranks may take to join, and for each round.

    Raises:
        RuntimeError: the other ranks did not join within `timeout`.
    """

    def __init__(self, name: str, world_size: int, rank: int, timeout: float) -> None:
        self.name, self.world_size, self.rank, self.timeout = name, world_size, rank, timeout
        self._rounds = 0
        self.rendezvous: Any = None
        self.rendezvous = self._find_rendezvous() if rank else self._create_rendezvous()
        self.exchange("join", None)

    def _key(self) -> bytes:
        return self.name.encode()

    def _create_rendezvous(self) -> Any:
        name = f"{self.name}-{uuid.uuid4().hex}"
        cls = remote(num_cpus=0, name=name, namespace=_NAMESPACE, max_concurrency=10_000)(Rendezvous)
        rendezvous = cls.remote(self.world_size)
        get(rendezvous.join.remote(0, _own_process()))
        require_session().gcs.call("kv_put", self._key(), name.encode(), True, _NAMESPACE)
        return rendezvous

    def _find_rendezvous(self) -> Any:
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            name = require_session().gcs.call("kv_get", self._key(), _NAMESPACE)
            if name is not None:
                try:
                    rendezvous = get_actor(name.decode(), _NAMESPACE)
                    if get(rendezvous.join.remote(self.rank, _own_process())):
                        return rendezvous
                except (ValueError, RayActorError):
                    pass  # the actor of an earlier group of this name
                time.sleep(_ACTOR_POLL_INTERVAL)
            time.sleep(_KEY_POLL_INTERVAL)
        raise RuntimeError(
            f"rank 0 of the collective group {self.name!r} did not join within {self.timeout:g} s, for which rank "
            f"{self.rank} of {self.world_size} waited; hint: all ranks call init_collective_group, at the same time"
        )

    def destroy(self) -> None:
        """Leave the group. Rank 0 removes its name."""
        if self.rank == 0 and require_session().gcs.call("kv_get", self._key(), _NAMESPACE) is not None:
            require_session().gcs.call("kv_del", self._key(), _NAMESPACE)
        self.rendezvous = None

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Contribute a value to the next round; returns the values of all ranks."""
        self._rounds += 1
        key = what, self._rounds
        try:
            values = self.await_others(
                what, self.rendezvous.exchange.remote(key, self.rank, value), lambda: self._late(key)
            )
        except GetTimeoutError:
            late = get(self.rendezvous.missing.remote(key))
            raise RuntimeError(
                f"{what} of the collective group {self.name!r}: ranks {late} of {self.world_size} did not arrive "
                f"within {self.timeout:g} s; hint: every rank has to call the same operations in the same order, "
                "gloo_timeout says how long they may take (ms)"
            ) from None
        except RayActorError as error:
            raise RuntimeError(
                f"{what}: the collective group {self.name!r} has ended, rank 0 has left it ({error})"
            ) from None
        if isinstance(values, str):
            raise RuntimeError(values)
        return cast("list[Any]", values)

    def await_others(self, what: str, ref: Any, late: Callable[[], list[int]]) -> Any:
        """Return the value of a ref that other ranks make ready. Ranks that have died are not waited for.

        Args:
            what: the operation. late: returns the ranks that are missing, as far as this one should look at them.

        Raises:
            GetTimeoutError: it did not come within `timeout`. RuntimeError: a rank that is missing has died.
        """
        deadline, pause = time.monotonic() + self.timeout, _FIRST_LOOK
        while (left := deadline - time.monotonic()) > pause:
            with contextlib.suppress(GetTimeoutError):
                return get(ref, timeout=pause)
            self._look_at(what, late())
            pause = min(2 * pause, _LONGEST_LOOK)
        return get(ref, timeout=max(0.0, left))

    def _late(self, key: Any) -> list[int]:
        """Return the ranks that are missing; []: another rank looks, one for all of them."""
        late: list[int] = get(self.rendezvous.missing.remote(key))
        return late if self.rank == min(set(range(self.world_size)) - set(late), default=None) else []

    def _look_at(self, what: str, ranks: list[int]) -> None:
        processes = get(self.rendezvous.processes.remote(ranks)) if ranks else {}
        if not processes:
            return
        alive = {row["worker"] for row in require_session().gcs.call("actors") if row["state"] == "ALIVE"}
        if dead := [rank for rank, process in processes.items() if process not in alive]:
            problem = (
                f"{what} of the collective group {self.name!r}: of its {self.world_size} ranks {dead} have died; hint: "
                "destroy_collective_group, then init_collective_group with new ones"
            )
            get(self.rendezvous.fail.remote(problem))
            raise RuntimeError(problem)


class StoreGroup:
    """Membership of one rank in a group over the object stores: each rank puts its array and reads those of the others.

    On one node the arrays are in shared memory; between nodes they move like other objects (UCX). No port is opened. A
    reduction of large arrays moves each byte twice, as a ring does: every rank reduces one part and puts the result.

    Args, Raises: as for `Membership`; `timeout` holds for the start of each operation, too.
    """

    def __init__(self, name: str, world_size: int, rank: int, timeout: float) -> None:
        self.name, self.world_size, self.rank = name, world_size, rank
        self._timeout = timeout
        self._mail_counts: dict[tuple[int, int], int] = {}
        self._members = Membership(name, world_size, rank, timeout)
        self._exchange = self._members.exchange

    def destroy(self) -> None:
        """Leave the group. Rank 0 removes its name."""
        self._members.destroy()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._exchange("barrier", None)

    def allgather(self, tensors: list[Any], tensor: Any) -> None:
        """Gather the tensors of all ranks into `tensors`, by rank."""
        for mine, values in zip(tensors, self._exchange("allgather", _to_message(_array_of(tensor))), strict=True):
            _fill(mine, _from_message(values))

    def broadcast(self, tensor: Any, root: int) -> None:
        """Copy the tensor of rank `root`."""
        values = self._exchange("broadcast", _to_message(_array_of(tensor)) if self.rank == root else None)
        if self.rank != root:
            _fill(tensor, _from_message(values[root]))

    def allreduce(self, tensor: Any, op: ReduceOp) -> None:
        """Reduce the tensors of all ranks element by element, in the order of the ranks."""
        _refuse_half(tensor)
        array = _array_of(tensor)
        if array.nbytes <= _INLINE_LIMIT or self.world_size == 1:
            _fill(tensor, _reduced(self._exchange("allreduce", _to_message(array)), op))
            return
        parts = np.array_split(array.reshape(-1), self.world_size)
        values = self._exchange("allreduce", _to_message(self._reduced_part("allreduce", parts, op)))
        _fill(tensor, np.concatenate([_from_message(item) for item in values]).reshape(array.shape))

    def reduce(self, tensor: Any, root: int, op: ReduceOp) -> None:
        """Reduce the tensors of all ranks on rank `root`."""
        _refuse_half(tensor)
        values = self._exchange("reduce", _to_message(_array_of(tensor)))
        if self.rank == root:
            _fill(tensor, _reduced(values, op))

    def reducescatter(self, tensor: Any, tensors: list[Any], op: ReduceOp) -> None:
        """Reduce `tensors` of all ranks into `tensor`, the part of this rank."""
        _refuse_half(tensor)
        _fill(tensor, self._reduced_part("reducescatter", [_array_of(part) for part in tensors], op))

    def gather(self, tensor: Any, tensors: list[Any] | None, root: int) -> None:
        """Gather the tensors of all ranks into `tensors` of rank `root`, by rank."""
        values = self._exchange("gather", _to_message(_array_of(tensor)))
        if self.rank == root:
            for mine, value in zip(tensors or (), values, strict=True):
                _fill(mine, _from_message(value))

    def scatter(self, tensor: Any, tensors: list[Any] | None, root: int) -> None:
        """Copy of `tensors` of rank `root` the one at this rank's index."""
        given = [_to_message(_array_of(part)) for part in tensors or ()] if self.rank == root else None
        _fill(tensor, _from_message(self._exchange("scatter", given)[root][self.rank]))

    def alltoall(self, tensors: list[Any], given: list[Any]) -> None:
        """Copy into `tensors` what each rank has given for this one, by rank."""
        rows = self._exchange("alltoall", [_to_message(_array_of(part)) for part in given])
        for mine, row in zip(tensors, rows, strict=True):
            _fill(mine, _from_message(row[self.rank]))

    def send(self, tensor: Any, to: int) -> None:
        """Send a tensor to another rank. Returns before `recv`."""
        message = _to_message(_array_of(tensor))
        get(self._members.rendezvous.post.remote(self._mail_key(self.rank, to), message), timeout=self._timeout)

    def recv(self, tensor: Any, source: int) -> None:
        """Receive the next tensor that `source` sent to this rank."""
        try:
            taken = self._members.rendezvous.take.remote(self._mail_key(source, self.rank))
            message = self._members.await_others("recv", taken, lambda: [source])
            values = _from_message(message)
        except GetTimeoutError:
            raise RuntimeError(
                f"recv of the collective group {self.name!r}: rank {source} sent nothing to rank {self.rank} within "
                f"{self._timeout:g} s"
            ) from None
        _fill(tensor, values)

    def _reduced_part(self, what: str, parts: list[Any], op: ReduceOp) -> Any:
        values = self._exchange(what, [_to_message(part) for part in parts])
        return _reduced([row[self.rank] for row in values], op)

    def _mail_key(self, source: int, to: int) -> tuple[str, int, int, int]:
        number = self._mail_counts[source, to] = self._mail_counts.get((source, to), 0) + 1
        return "mail", source, to, number


def _own_process() -> bytes:
    """Return the id of this process if it is an actor, whose death the head knows; else b""."""
    return require_session().me if get_runtime_context().get_actor_id() else b""


def _to_message(array: Any) -> Any:
    """Return a small array itself, a large one as [ref]; the list keeps the rendezvous from fetching the value."""
    if array.nbytes <= _INLINE_LIMIT:
        return np.array(array)
    return [put(np.ascontiguousarray(array))]


def _from_message(item: Any) -> Any:
    return get(item[0]) if isinstance(item, list) else item


def _reduced(messages: list[Any], op: ReduceOp) -> Any:
    arrays = [_from_message(message) for message in messages]
    total = np.array(arrays[0])
    for array in arrays[1:]:
        _REDUCE[op](total, array, out=total, casting="unsafe")
    return (total / len(arrays)).astype(total.dtype) if op is ReduceOp.AVERAGE else total


def _array_of(tensor: Any) -> Any:
    """Return the values as a NumPy array, as a view where possible."""
    if not is_torch(tensor):
        return tensor
    plain = tensor.detach().cpu()
    torch = sys.modules["torch"]
    return (plain.view(torch.int16) if plain.dtype is torch.bfloat16 else plain).numpy()


def _fill(tensor: Any, values: Any) -> None:
    """Write values into a tensor.

    Raises:
        RuntimeError: other processes read this memory: it is in the object store, like large arrays from `get`, or is
            that of an object which this process passes on. ValueError: the shapes differ.
    """
    if is_torch(tensor):
        torch = sys.modules["torch"]
        if tensor.device.type == "cpu" and _is_in_store(tensor.data_ptr()):
            raise RuntimeError(_READ_BY_OTHERS.format("tensor", "x.clone()"))
        new = torch.from_numpy(np.array(values)).reshape(tensor.shape)
        with torch.no_grad():
            tensor.copy_(new.view(torch.bfloat16) if tensor.dtype is torch.bfloat16 else new)
        return
    if not tensor.flags.writeable:
        if not _is_of_a_message(tensor):
            raise RuntimeError(_READ_BY_OTHERS.format("array", "np.array(x)"))
        tensor = np.asarray(_Writable(tensor))
    if tensor.size != np.size(values):
        raise ValueError(f"an array of shape {tensor.shape} cannot take values of shape {np.shape(values)}")
    np.copyto(tensor, np.reshape(values, tensor.shape), casting="unsafe")


_READ_BY_OTHERS = (
    "the {0} is read-only, and the result has to be written into it; hint: {0}s that get() returned are views of the "
    "object store: use a copy, {1}"
)


class _Writable:
    """The memory of an array, as NumPy may write it."""

    def __init__(self, array: Any) -> None:
        self._array = array  # which keeps the memory
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _is_of_a_message(array: Any) -> bool:
    """True for an array that came in a message, as an argument does, and whose memory nothing but this array uses. It
    is the message itself, or a copy of a longer one, which `deserialize` has made so that its buffers are aligned."""
    owner = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    blob = owner.obj if isinstance(owner, memoryview) else None
    if isinstance(blob, bytearray):
        return True
    return isinstance(blob, bytes) and has_buffers(blob) and require_session().reader.is_private(blob)


def _is_in_store(address: int) -> bool:
    arenas = list(require_session().stores.arenas.values())
    return any(arena.address <= address < arena.address + arena.size for arena in arenas)


def _refuse_half(tensor: Any) -> None:
    """Raise RuntimeError for bfloat16, which NumPy cannot reduce."""
    if is_torch(tensor) and tensor.dtype is sys.modules["torch"].bfloat16:
        raise RuntimeError("bfloat16 cannot be reduced on CPUs by this backend; hint: tensor.float()")


def is_torch(tensor: Any) -> bool:
    """Return True for a PyTorch tensor. Does not import PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)
