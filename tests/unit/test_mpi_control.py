"""The control wire over MPI, on a library that does what the test says: when it looks, and when it may sleep."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hpcray.transport.mpi_control import MpiControl


class Message:
    """One that has come whole."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def Irecv(self, buffer: Any) -> Any:
        buffer[0][:] = self._data
        return SimpleNamespace(Test=lambda: True)


class Comm:
    """What `Improbe` finds, look by look."""

    def __init__(self) -> None:
        self.looks: deque[bytes | None] = deque()
        self.looked = 0

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 2

    def Improbe(self, source: int, tag: int, status: Any) -> Message | None:
        self.looked += 1
        data = self.looks.popleft() if self.looks else None
        status.size = len(data or b"")
        return None if data is None else Message(data)

    def Iprobe(self, source: int, tag: int) -> bool:
        return False


class Status:
    """Of a message of rank 1."""

    size = 0

    def Get_source(self) -> int:
        return 1

    def Get_count(self, kind: Any) -> int:
        return self.size


class Bell:
    """A UCX engine without UCX."""

    def __init__(self) -> None:
        self.has_come = False
        self.sent_counts: list[Callable[[int], int]] = []

    def progress(self) -> bool:
        return False

    def heard(self) -> list[tuple[int, int]]:
        return []

    def hungry(self) -> bool:
        return False

    def arm(self) -> bool:
        return True

    def ripe(self) -> bool:
        return self.has_come

    def connected(self) -> int:
        return 1


@pytest.fixture
def comm() -> Comm:
    return Comm()


@pytest.fixture
def bell() -> Bell:
    return Bell()


@pytest.fixture
def control(comm: Comm, bell: Bell) -> MpiControl:
    module = SimpleNamespace(Status=Status, BYTE="byte", ANY_SOURCE=-1, Exception=RuntimeError)
    found: Any = bell
    world: Any = comm
    return MpiControl(module, world, found)


def test_after_a_sleep_what_is_found_at_the_second_look_counts(control: MpiControl, comm: Comm) -> None:
    assert control.arm()
    comm.looks.extend([None, b"one", b"two"])
    assert control.poll() == [(1, b"one"), (1, b"two")]


def test_awake_it_looks_once(control: MpiControl, comm: Comm) -> None:
    comm.looks.extend([None, b"one"])
    assert control.poll() == [] and comm.looked == 1
    assert control.poll() == [(1, b"one")]


def test_nobody_sleeps_on_an_object_that_has_come(control: MpiControl, bell: Bell) -> None:
    bell.has_come = True
    assert not control.arm()
    bell.has_come = False
    assert control.arm()
