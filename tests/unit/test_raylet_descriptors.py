"""`share_descriptors`: workers get a raylet's descriptors first, then neighbors' processes; refusals are reported."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from hpcray.common.config import Config
from hpcray.core.raylet.worker_pool import WorkerPool
from hpcray.runtime.raylet import local_processes

FILES = 4096


class Node:
    """The parts of a raylet to which `room` processes may connect."""

    def __init__(self, room: int, pool: int, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self.loop = SimpleNamespace(now=100.0)
        self.pool = WorkerPool(0, 1, Config(max_workers=pool))
        self.neighbor_clients = SimpleNamespace(limit=0)
        self.listener = SimpleNamespace(full_listeners=[])
        monkeypatch.setattr(local_processes, "raise_open_file_limit", lambda: FILES)
        monkeypatch.setattr(local_processes, "free_connections", {FILES: room}.__getitem__)
        local_processes.share_descriptors(
            self.lines.append, self.loop, self.pool, self.neighbor_clients, self.listener, nodes
        )  # type: ignore[arg-type]

    @property
    def shares(self) -> tuple[int, int]:
        """The limits of workers and of neighbors' processes."""
        return self.pool.limit, self.neighbor_clients.limit


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Node]:
    return lambda room, pool, nodes=2: Node(room, pool, nodes, monkeypatch)


@pytest.mark.parametrize(("room", "clients"), [(1000, 935), (87, 22)])
def test_neighbors_clients_get_the_descriptors_beyond_pool_and_driver(
    node: Callable[..., Node], room: int, clients: int
) -> None:
    made = node(room, 64)
    assert made.shares == (64, clients) and "max_workers" in made.pool.limit_reason


@pytest.mark.parametrize(("nodes", "shares"), [(1, (63, 0)), (2, (47, 16)), (1000, (47, 16))])
def test_too_few_descriptors_reduce_the_worker_pool(
    node: Callable[..., Node], nodes: int, shares: tuple[int, int]
) -> None:
    made = node(64, 64, nodes)
    assert made.shares == shares, "neighbors' processes, where there may be any, get a quarter"
    assert f"{FILES} open files" in made.pool.limit_reason and "ulimit -n" in made.pool.limit_reason


@pytest.mark.parametrize("room", [1, 0, -5])
def test_one_worker_remains_without_descriptors_and_no_neighbors_client(node: Callable[..., Node], room: int) -> None:
    workers, clients = node(room, 64).shares
    assert workers == 1 and clients == 0


def test_refused_connections_are_reported_at_most_every_ten_seconds(node: Callable[..., Node]) -> None:
    made = node(100, 64)
    for now, count in ((100.0, 1), (109.0, 1), (111.0, 2)):
        made.loop.now = now
        made.listener.full_listeners[0]()
        assert len(made.lines) == count
    assert "turned away" in made.lines[0] and str(FILES) in made.lines[0]
