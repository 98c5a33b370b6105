"""Several nodes, here threads, get a copy of one directory: `runtime_env.env_broadcast.share` over queues."""

from __future__ import annotations

import queue
import random
import sys
import threading
from pathlib import Path

import pytest

from hpcray.common.exceptions import StartupError
from hpcray.common.labels import Place
from hpcray.platform.path_relocation import PathRelocation
from hpcray.runtime_env import env_broadcast
from hpcray.runtime_env.env_broadcast import share
from hpcray.transport.base import PeerLost

SIZE = 6


class Wire:
    """A `ControlTransport` between threads."""

    def __init__(self, rank: int, wires: list[Wire]) -> None:
        self.rank = rank
        self.size = SIZE
        self.inbox: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self.gone: list[tuple[int, str]] = []
        self.dead: set[int] = set()
        self.sent: dict[int, int] = {}
        self._wires = wires

    def send(self, dest: int, data: bytes, wake: bool = True) -> None:
        if dest in self.dead:
            raise PeerLost(dest, "killed")
        self.sent[dest] = self.sent.get(dest, 0) + len(data)
        self._wires[dest].inbox.put((self.rank, data))

    def poll(self) -> list[tuple[int, bytes]]:
        found = []
        while not self.inbox.empty():
            found.append(self.inbox.get())
        return found

    def lost(self) -> list[tuple[int, str]]:
        gone, self.gone = self.gone, []
        return gone

    def pending(self) -> bool:
        return False


class Job:
    """`share` on every node at once.

    Attributes:
        results: by rank, what it returned or raised.
    """

    def __init__(self, tmp: Path, source: Path) -> None:
        self.places: list[Place] = [()] * SIZE
        self.wires: list[Wire] = []
        self.wires += [Wire(rank, self.wires) for rank in range(SIZE)]
        self.sessions = [tmp / f"s{rank}" for rank in range(SIZE)]
        self.source = source
        self.results: dict[int, PathRelocation | StartupError] = {}
        for session in self.sessions:
            session.mkdir()

    def run(self, timeout: float = 60.0, absent: int = -1) -> dict[int, PathRelocation | StartupError]:
        threads = [threading.Thread(target=self._node, args=(rank, timeout)) for rank in range(SIZE) if rank != absent]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a node hangs"
        return self.results

    def _node(self, rank: int, timeout: float) -> None:
        try:
            wire = self.wires[rank]
            self.results[rank] = share(
                str(self.source),
                [],
                wire,  # type: ignore[arg-type]
                str(self.sessions[rank]),
                timeout,
                self.places[rank],
            )
        except StartupError as error:
            self.results[rank] = error


@pytest.fixture(params=["nothing known", "two switches"])
def job(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    source = tmp_path / "source"
    source.mkdir()
    noise = random.Random(7)
    for number in range(40):
        (source / f"{number}.bin").write_bytes(noise.randbytes(number * 1000))
    (source / "large.bin").write_bytes(noise.randbytes(1 << 20))
    monkeypatch.setattr(sys, "path", [str(source), *sys.path])
    monkeypatch.setattr(env_broadcast, "CHUNK", 50_000)  # the stream of 2 MB is many chunks
    job = Job(tmp_path, source)
    if request.param == "two switches":
        job.places = [("s0", f"s{rank % 2}") for rank in range(SIZE)]
    return job


def test_every_node_has_the_same(job: Job) -> None:
    results = job.run()
    expected = {path.name: path.read_bytes() for path in job.source.iterdir()}
    for rank, moved in results.items():
        assert isinstance(moved, PathRelocation), moved
        copy = job.sessions[rank] / "env"
        assert moved.copy(str(job.source)) == str(copy)
        assert {path.name: path.read_bytes() for path in copy.iterdir()} == expected
        assert [path.name for path in job.sessions[rank].iterdir()] == ["env"], "the stream itself is gone"


def test_the_stream_crosses_the_link_between_two_switches_once(job: Job) -> None:
    if not job.places[0]:
        pytest.skip("nothing is known of the network")
    assert all(isinstance(moved, PathRelocation) for moved in job.run().values())
    size = sum(path.stat().st_size for path in job.source.iterdir())
    crossed = sum(
        sent for wire in job.wires for dest, sent in wire.sent.items() if job.places[dest] != job.places[wire.rank]
    )
    assert size < crossed < 1.1 * size


def test_ranks_that_do_not_know_their_place_get_it_too(job: Job) -> None:
    job.places[3] = ()
    assert all(isinstance(moved, PathRelocation) for moved in job.run().values())


def test_a_failed_disk_of_one_node_ends_a_broadcast_on_all_nodes(job: Job) -> None:
    (job.sessions[5] / "env").mkdir()
    results = job.run()
    texts = {str(result) for result in results.values()}
    assert len(texts) == 1 and "node 5 on " in texts.pop()
    assert {rank for rank, result in results.items() if result.reported_by == "self"} == {0, 5}


def test_node_that_says_nothing_is_named(job: Job) -> None:
    results = job.run(timeout=1.0, absent=5)
    assert {type(result) for result in results.values()} == {StartupError}
    for result in results.values():  # nodes that are done, or are above in the tree, leave it to the one that knows
        assert "nothing moved for 1 s, waiting for nodes 5; hint: HPCRAY_START_TIMEOUT" in str(result)


def test_node_that_is_lost_is_named(job: Job) -> None:
    for wire in job.wires:
        wire.dead.add(5)
    job.wires[4].gone.append((5, "its process was killed"))
    results = job.run(absent=5)
    assert all("node 5 is lost" in str(results[rank]) or "rank 5 is lost" in str(results[rank]) for rank in range(5))


def test_wrong_directory_is_told_by_rank_0(job: Job, tmp_path: Path) -> None:
    job.source = tmp_path / "nowhere"
    results = job.run()
    assert results[0].reported_by == "self" and "no such directory" in str(results[0])
    assert all(results[rank].reported_by == "rank0" for rank in range(1, SIZE))
