"""The baselines: mpi4py and ucxx used directly, on the same arenas, spinning as a benchmark may."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable
from typing import Any

from effort import place

from hpcray.transport.ucx_engine import make_context


class Mpi:
    """mpi4py, non-blocking with Waitall. MPI is running already; a communicator of its own."""

    def __init__(self, arena: memoryview, peer: int) -> None:
        from mpi4py import MPI

        self._wait = MPI.Request.Waitall
        self._comm = MPI.COMM_WORLD.Dup()
        self._peer = peer
        self._arena = arena
        self._sends: list[Any] = []
        self._receives: list[Any] = []

    def prepare(self, count: int, size: int) -> None:
        """See `Wire`."""
        self._receives = [self._comm.Irecv(self._at(number, size), self._peer) for number in range(count)]

    def send(self, size: int) -> None:
        """See `Wire`."""
        self._sends.append(self._comm.Isend(self._at(len(self._sends), size), self._peer))

    def sent(self, count: int) -> None:
        """See `Wire`."""
        self._wait(self._sends)
        self._sends.clear()

    def received(self, count: int) -> None:
        """See `Wire`."""
        self._wait(self._receives[:count])
        del self._receives[:count]

    def bcast(self, size: int) -> None:
        """From rank 0 to all."""
        self._comm.Bcast(self._arena[:size], 0)

    def allgather(self, size: int) -> None:
        """From each to all; the arena must hold one more than there are ranks."""
        end = size * (self._comm.Get_size() + 1)
        self._comm.Allgather(self._arena[:size], self._arena[size:end])

    def alltoall(self, size: int) -> None:
        """From each to each; the arena must hold twice as many as there are ranks."""
        end = size * self._comm.Get_size()
        self._comm.Alltoall(self._arena[:end], self._arena[end : 2 * end])

    def barrier(self) -> None:
        """All are here."""
        self._comm.Barrier()

    def _at(self, number: int, size: int) -> memoryview:
        at = place(number, size)
        return self._arena[at : at + size]


class Ucx:
    """ucxx's synchronous layer, with a context, a worker and an endpoint of its own.

    Args:
        swap: gives our address to the peer and returns the peer's.
        alike: set up as hpcray sets up UCX (a peer's death is survived, no segments that others can map); else as UCX
            does by itself.
    """

    def __init__(self, arena: memoryview, swap: Callable[[bytes], bytes], alike: bool) -> None:
        lib = importlib.import_module("ucxx._lib.libucxx")
        self._array = importlib.import_module("ucxx._lib.arr").Array
        self._context, guarded = (
            make_context(lib, _one_host()) if alike else (lib.UCXContext({}, (lib.Feature.TAG,)), False)
        )
        self._worker = lib.UCXWorker(self._context, False, False)
        address = lib.UCXAddress.create_from_buffer(swap(bytes(memoryview(self._worker.address))))
        self._endpoint = lib.UCXEndpoint.create_from_worker_address(self._worker, address, guarded)
        self._tag = lib.UCXXTag(0)
        self._arena = arena
        self._sends: list[Any] = []
        self._receives: list[Any] = []

    def prepare(self, count: int, size: int) -> None:
        """See `Wire`."""
        self._receives = [self._worker.tag_recv(self._at(number, size), self._tag) for number in range(count)]

    def send(self, size: int) -> None:
        """See `Wire`."""
        self._sends.append(self._endpoint.tag_send(self._at(len(self._sends), size), self._tag))

    def sent(self, count: int) -> None:
        """See `Wire`."""
        self._wait(self._sends)
        self._sends.clear()

    def received(self, count: int) -> None:
        """See `Wire`."""
        self._wait(self._receives[:count])
        del self._receives[:count]

    def _at(self, number: int, size: int) -> Any:
        at = place(number, size)
        return self._array(self._arena[at : at + size])

    def _wait(self, requests: list[Any]) -> None:
        progress = self._worker.progress
        for request in requests:
            while not request.completed:
                progress()
            request.check_error()


def _one_host() -> bool:
    from mpi4py import MPI

    return len(set(MPI.COMM_WORLD.allgather(socket.gethostname()))) == 1
