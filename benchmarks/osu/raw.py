"""The baselines: mpi4py and ucxx used directly, on the same arenas, spinning as a benchmark may."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


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
        self._receives = [self._comm.Irecv(self._arena[:size], self._peer) for _ in range(count)]

    def send(self, size: int) -> None:
        """See `Wire`."""
        self._sends.append(self._comm.Isend(self._arena[:size], self._peer))

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

    def barrier(self) -> None:
        """All are here."""
        self._comm.Barrier()


class Ucx:
    """ucxx's synchronous layer, with a context, a worker and an endpoint of its own, as UCX sets them up by itself.

    Args:
        swap: gives our address to the peer and returns the peer's.
    """

    def __init__(self, arena: memoryview, rank: int, swap: Callable[[bytes], bytes]) -> None:
        lib = importlib.import_module("ucxx._lib.libucxx")
        self._array = importlib.import_module("ucxx._lib.arr").Array
        self._context = lib.UCXContext({}, (lib.Feature.TAG,))
        self._worker = lib.UCXWorker(self._context, False, False)
        address = lib.UCXAddress.create_from_buffer(swap(self._worker.address.tobytes()))
        self._endpoint = lib.UCXEndpoint.create_from_worker_address(self._worker, address, False)
        self._tag = lib.UCXXTag(0)
        self._arena = arena
        self._sends: list[Any] = []
        self._receives: list[Any] = []

    def prepare(self, count: int, size: int) -> None:
        """See `Wire`."""
        buffer = self._array(self._arena[:size])
        self._receives = [self._worker.tag_recv(buffer, self._tag) for _ in range(count)]

    def send(self, size: int) -> None:
        """See `Wire`."""
        self._sends.append(self._endpoint.tag_send(self._array(self._arena[:size]), self._tag))

    def sent(self, count: int) -> None:
        """See `Wire`."""
        self._wait(self._sends)
        self._sends.clear()

    def received(self, count: int) -> None:
        """See `Wire`."""
        self._wait(self._receives[:count])
        del self._receives[:count]

    def _wait(self, requests: list[Any]) -> None:
        progress = self._worker.progress
        for request in requests:
            while not request.completed:
                progress()
            request.check_error()
