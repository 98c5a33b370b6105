"""Objects between nodes of one host: the receiver copies them straight out of the sender's arena, which it maps.

`HostData` stands before the plane that serves all other nodes, and leaves to it the nodes that it does not reach: those
of another container, or where descriptors are short. A receive is expected on both ways at once; the sender chooses.
What it offers (`host_offers`) stays as it is until the receiver has acknowledged it (`host_copies`), or until the
connection is closed: bytes that were copied meanwhile count only if the acknowledgement could still be written.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Mapping

from hpcray.host.arena import Arena
from hpcray.host.copying import threads_for_copies
from hpcray.runtime.host_copies import Copies
from hpcray.runtime.host_links import DATA_SOCKET, Watch
from hpcray.runtime.host_offers import Offers
from hpcray.runtime.local_links import Listener
from hpcray.transport.base import Backoff, DataPlane, Report

LEAST = 256 << 10
"""Bytes from which on a chunk is offered. Below, UCX is as fast; what is half as long it brings 10 us earlier."""


class HostData:
    """The `DataPlane` for a node that has neighbours on its host.

    Args:
        inner: what carries bytes to and from all other nodes.
        node: our number.
        arena: all of it, as for `register`.
        arena_fd: its memfd.
        directory: our session directory.
        huge: as `Config.huge_pages`.
        threads: most threads that copy; 0: as many as are good here.

    Attributes:
        name: that of `inner`.

    Raises:
        OSError: nobody can connect to `directory`, or no descriptor is left.
    """

    def __init__(
        self,
        inner: DataPlane,
        node: int,
        arena: memoryview,
        arena_fd: int,
        directory: str,
        huge: str = "auto",
        threads: int = 0,
    ) -> None:
        self.name = inner.name
        self._inner = inner
        self._arena = arena
        self._path = os.path.join(directory, DATA_SOCKET)
        self._done: list[Report] = []
        self._backoff = Backoff()
        listener = Listener(self._path, socket.SOCK_SEQPACKET)
        base = ctypes.addressof(ctypes.c_char.from_buffer(arena))
        self._watch = Watch()
        self._offers = Offers(node, listener, arena_fd, len(arena), self._watch, self._done)
        threads = threads or threads_for_copies()
        self._copies = Copies(node, base, huge, threads, inner.cancel, self._watch, self._done)

    def meet(self, directories: Mapping[int, str]) -> None:
        """See `DataPlane.meet`."""
        for node, directory in directories.items():
            self._copies.meet(node, directory)

    def address(self) -> bytes:
        """See `DataPlane.address`."""
        return self._inner.address()

    def connect(self, node: int, address: bytes, same_host: bool) -> None:
        """See `DataPlane.connect`."""
        self._inner.connect(node, address, same_host)

    def register(self, arena: memoryview) -> None:
        """See `DataPlane.register`."""
        self._inner.register(arena)

    def receive(self, node: int, tag: int, offset: int, size: int) -> None:
        """See `DataPlane.receive`."""
        self._inner.receive(node, tag, offset, size)
        if size:
            self._copies.expect(node, tag, offset, size)

    def send(self, node: int, tag: int, offset: int, size: int) -> None:
        """See `DataPlane.send`."""
        if size >= LEAST and self._offers.send(node, tag, offset, size):
            self._backoff.touch()
        else:
            self._inner.send(node, tag, offset, size)

    def cancel(self, tag: int) -> bool:
        """See `DataPlane.cancel`."""
        cancelled = self._copies.cancel(tag)
        return self._inner.cancel(tag) if cancelled is None else cancelled

    def forget(self, node: int, why: str) -> None:
        """See `DataPlane.forget`. What a thread is writing ends with its error when the thread is through."""
        self._offers.forget(node, why)
        self._copies.forget(node, why)
        self._inner.forget(node, why)

    def progress(self) -> list[Report]:
        """See `DataPlane.progress`."""
        self._watch.look()
        worked = self._copies.work()
        for report in self._inner.progress():
            if report[0] == "received":
                self._copies.came(report[2])
            self._done.append(report)
        done = self._done[:]
        self._done.clear()  # the others hold on to it
        if worked or done:
            self._backoff.touch()
        return done

    def busy(self) -> bool:
        """See `DataPlane.busy`."""
        return bool(self._done or self._offers.flying or self._copies.busy() or self._inner.busy())

    def fileno(self) -> int | None:
        """See `DataPlane.fileno`."""
        return self._watch.fileno()

    def patience(self) -> float:
        """See `DataPlane.patience`."""
        if self._done or self._copies.hungry():
            return 0.0
        if (self._offers.flying or self._copies.busy()) and self._backoff.lively():
            return 0.0
        return self._inner.patience()

    def close(self) -> None:
        """See `DataPlane.close`."""
        self._offers.close()
        self._copies.close()
        self._watch.close()
        try:
            os.unlink(self._path)
        except OSError:
            pass  # gone with the directory
        self._done.clear()
        self._inner.close()
        self._arena = memoryview(b"")


def with_neighbours(inner: DataPlane, node: int, arena: Arena, directory: str, huge: str) -> DataPlane:
    """`HostData`, or `inner` alone where other nodes cannot connect; for the arguments see `HostData`."""
    try:
        return HostData(inner, node, arena.view(0, arena.whole), arena.fd, directory, huge)
    except OSError as error:
        why = f"{os.path.join(directory, DATA_SOCKET)}: {error}"
        print(f"hpcray: node {node}: objects go to other nodes of this host by {inner.name}: {why}", file=sys.stderr)
        return inner
