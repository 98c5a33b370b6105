"""Nodes of one host in one process: data planes on a wire that carries nothing, unless its time is advanced."""

from __future__ import annotations

import mmap
import os
import random
import select
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcray.host import copiers
from hpcray.runtime import host_data
from hpcray.runtime.host_data import HostData
from hpcray.transport.base import FOREVER, Report
from hpcray.transport.loopback import LoopbackNet

ARENA = 32 << 20
BIG = 3 << 20
SMALL = 50_000


class Host:
    """Nodes of one host.

    Attributes:
        net: the wire between them; what goes over it arrives when its time is advanced.
        planes: their data planes.
        reports: what each was told by `run`.
        arenas: of each node.
    """

    def __init__(self, tmp: Path, nodes: int, meet: bool = True, threads: int = 2) -> None:
        self.net = LoopbackNet(nodes, lambda source, dest, size: 1.0)
        self.planes: list[HostData] = []
        self.arenas: list[memoryview] = []
        self.dirs = [str(tmp / str(node)) for node in range(nodes)]
        self._fds: list[int] = []
        self._ended: set[int] = set()
        self.reports: dict[int, list[Report]] = {node: [] for node in range(nodes)}
        for node in range(nodes):
            os.mkdir(self.dirs[node], 0o700)
            fd = os.memfd_create("arena")
            os.ftruncate(fd, ARENA)
            self._fds.append(fd)
            self.arenas.append(memoryview(mmap.mmap(fd, ARENA)))
            plane = HostData(self.net.planes[node], node, self.arenas[node], fd, self.dirs[node], threads=threads)
            plane.register(self.arenas[node])
            self.planes.append(plane)
        if meet:
            self.meet()

    def meet(self) -> None:
        """All connect to all."""
        for node, plane in enumerate(self.planes):
            plane.meet({other: self.dirs[other] for other in range(len(self.planes)) if other != node})
        for _ in range(4):
            for plane in self.planes:
                assert plane.progress() == []

    def fill(self, node: int, seed: int, offset: int, size: int) -> bytes:
        data = random.Random(seed).randbytes(size)
        self.arenas[node][offset : offset + size] = data
        return data

    def run(self, *nodes: int, until: Callable[[], object]) -> None:
        """Let these nodes work, asleep while they may be, until the condition holds."""
        for _ in range(100_000):
            for node in nodes:
                self.reports[node] += self.planes[node].progress()
            if until():
                return
            waiting = [self.planes[node] for node in nodes]
            if all(plane.patience() == FOREVER for plane in waiting):
                ready = select.select(waiting, [], [], 30)[0]
                assert ready, "nothing wakes them"
        raise AssertionError("in vain")

    def close(self) -> None:
        self.net.advance(1e9)
        for node in range(len(self.planes)):
            self.end(node)
        for fd in self._fds:
            os.close(fd)

    def end(self, node: int) -> None:
        """This one leaves."""
        if node not in self._ended:
            self._ended.add(node)
            self.planes[node].close()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Host]]:
    monkeypatch.setattr(host_data, "LEAST", 1)
    hosts: list[Host] = []
    fds, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    maps = windows()

    def make(nodes: int = 2, meet: bool = True, threads: int = 2, below: Path = tmp_path) -> Host:
        hosts.append(Host(below, nodes, meet, threads))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()
        assert not [path for path in host.dirs if os.path.exists(path + "/d.s")], "a socket is left"
        for path in host.dirs:
            shutil.rmtree(path)
        host.arenas.clear()
    assert set(os.listdir("/proc/self/fd")) == fds
    assert set(threading.enumerate()) == threads
    assert windows() == maps


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Threads that copy wait for this event first."""
    event = threading.Event()
    original = copiers.copy

    def copy(job: copiers.Job) -> None:
        if threading.current_thread().name == "hpcray-copier":
            assert event.wait(60)
        original(job)

    monkeypatch.setattr(copiers, "copy", copy)
    yield event
    event.set()


def windows() -> int:
    """Number of shared read-only mappings of memfds."""
    return sum("r--s" in line and "memfd:arena" in line for line in Path("/proc/self/maps").read_text().splitlines())


def copiers_of(host: Host) -> int:
    return host.planes[1]._copies._copiers.most
