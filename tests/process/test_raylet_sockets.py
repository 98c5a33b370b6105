"""The raylet's socket, used without a core worker: joining, leases, broken peers, deaths."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import TypeVar

import pytest
from helpers.leaks import LeakCheck, wait_until

from hpcray.common.ids import NIL_PROC, make_proc, number_of, raylet_of
from hpcray.common.resources import UNIT
from hpcray.processes.bootstrap import NodeChild
from hpcray.protocol import messages as m
from hpcray.protocol.frames import FrameReader, pack
from hpcray.runtime.node.options import NodeOptions

RAYLET = raylet_of(0)
ONE_CPU = m.Shape((("CPU", UNIT),))
Kind = TypeVar("Kind")


class Peer:
    """A process of the node, played by this test."""

    def __init__(self, session_dir: str, kind: str = "attached") -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(60)
        self.sock.connect(f"{session_dir}/r.s")
        self.fds: list[int] = []
        self._reader = FrameReader()
        self._seen: list[m.Message] = []
        self.me = NIL_PROC
        self.say(m.Hello(os.getpid(), kind))

    def join(self) -> m.Welcome:
        """Wait for Welcome and take its name."""
        data, self.fds, _, _ = socket.recv_fds(self.sock, 65536, 4)
        self._take(data)
        welcome = self.expect(m.Welcome)
        self.me = welcome.proc
        return welcome

    def say(self, *messages: m.Message, dest: bytes = RAYLET) -> None:
        """Send one frame."""
        self.sock.sendall(pack(dest, self.me, m.encode(list(messages))))

    def expect(self, kind: type[Kind]) -> Kind:
        """The next message of this kind; others before it are dropped."""
        while True:
            while self._seen:
                msg = self._seen.pop(0)
                if isinstance(msg, kind):
                    return msg
            data = self.sock.recv(65536)
            assert data, f"the connection closed while waiting for {kind.__name__}"
            self._take(data)

    def closed(self) -> bool:
        """Wait for the end of the connection."""
        while True:
            try:
                if not self.sock.recv(65536):
                    return True
            except ConnectionError:
                return True

    def close(self) -> None:
        """Let go."""
        self.sock.close()
        while self.fds:
            os.close(self.fds.pop())

    def _take(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            self._seen += m.decode(frame[20:])


@pytest.fixture
def node(leak_check: LeakCheck) -> Iterator[NodeChild]:
    child = NodeChild(NodeOptions(num_cpus=1, config={"prestart": 0, "object_store_memory": 64 << 20}))
    yield child
    child.leave()


@pytest.fixture
def peer(node: NodeChild) -> Iterator[Peer]:
    found = Peer(node.session_dir)
    found.join()
    yield found
    found.close()


def test_a_process_gets_a_welcome_with_its_arena(node: NodeChild) -> None:
    peer = Peer(node.session_dir)
    welcome = peer.join()
    assert (welcome.session_dir, welcome.cluster_size, welcome.arena_size) == (node.session_dir, 1, 64 << 20)
    assert os.fstat(peer.fds[0]).st_size >= 64 << 20, "the arena came along, with the slots behind it"
    assert len(welcome.node_id) == 56
    other = Peer(node.session_dir)
    assert other.join().proc != welcome.proc
    peer.close()
    other.close()


def test_a_returned_lease_frees_its_worker(node: NodeChild, peer: Peer, leak_check: LeakCheck) -> None:
    peer.say(m.RequestLeases(0, ONE_CPU, 1))
    granted = peer.expect(m.LeaseGranted)
    assert os.path.exists(f"{node.session_dir}/{number_of(granted.worker)}.s"), "the worker listens for us"
    peer.say(m.ReturnLease(granted.lease))
    peer.say(m.RequestLeases(0, ONE_CPU, 2))
    assert peer.expect(m.LeaseGranted).worker == granted.worker, "the same worker, warm"


def test_the_death_of_a_killed_worker_names_its_signal(peer: Peer, leak_check: LeakCheck) -> None:
    peer.say(m.RequestLeases(0, ONE_CPU, 1))
    granted = peer.expect(m.LeaseGranted)
    (pid,) = leak_check.processes("hpcray-worker")
    os.kill(pid, signal.SIGKILL)
    revoked = peer.expect(m.LeaseRevoked)
    assert revoked.lease == granted.lease
    assert "signal 9 (SIGKILL)" in revoked.reason
    peer.say(m.Exit(0), dest=granted.worker)
    assert "signal 9 (SIGKILL)" in peer.expect(m.Undeliverable).reason


def test_worker_that_closes_its_connection_is_ended(peer: Peer, leak_check: LeakCheck, node: NodeChild) -> None:
    peer.say(m.RequestLeases(0, ONE_CPU, 1))
    peer.expect(m.LeaseGranted)
    (pid,) = leak_check.processes("hpcray-worker")
    os.kill(pid, signal.SIGSTOP)  # it cannot be asked to leave any more
    peer.close()
    wait_until(lambda: pid not in leak_check.processes(), "the end of the worker of a holder that is gone")


def test_frames_between_processes_are_forwarded(node: NodeChild, peer: Peer) -> None:
    other = Peer(node.session_dir)
    other.join()
    peer.say(m.CancelTask(b"task", True, False), dest=other.me)
    assert other.expect(m.CancelTask).task == b"task"
    other.close()
    died = peer.expect(m.ProcDied)
    assert died.proc == other.me, "who wrote to it is told of its end"


def test_a_message_to_an_unknown_process_is_undeliverable(peer: Peer) -> None:
    for nowhere in (make_proc(0, 4711), make_proc(7, 1)):
        peer.say(m.Exit(0), dest=nowhere)
        assert peer.expect(m.Undeliverable).proc == nowhere


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\xff\xff\xff\xff" + bytes(16),
        pack(RAYLET, NIL_PROC, b"\xc1"),
        pack(RAYLET, NIL_PROC, m.encode([m.Exit(0)])),
        pack(RAYLET, NIL_PROC, m.encode([m.Hello(1, "king")])),
    ],
)
def test_an_invalid_frame_closes_only_its_own_connection(node: NodeChild, peer: Peer, nonsense: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(60)
        sock.connect(f"{node.session_dir}/r.s")
        sock.sendall(nonsense)
        assert sock.recv(1) == b""
    peer.say(m.Exit(0), dest=make_proc(0, 4711))
    peer.expect(m.Undeliverable)


def test_an_invalid_frame_after_hello_counts_as_a_death(node: NodeChild, peer: Peer) -> None:
    other = Peer(node.session_dir)
    other.join()
    peer.say(m.Blocked(), dest=other.me)
    other.expect(m.Blocked)
    other.sock.sendall(pack(RAYLET, other.me, b"\xc1"))
    assert other.closed()
    assert "not a message" in peer.expect(m.ProcDied).reason
    other.close()


def test_a_process_that_never_reads_delays_no_other(node: NodeChild, peer: Peer) -> None:
    deaf = Peer(node.session_dir)
    deaf.join()
    big = m.Undeliverable(b"x", "y" * 100_000)
    for _ in range(100):
        peer.say(big, dest=deaf.me)
    peer.say(m.Exit(0), dest=make_proc(0, 4711))
    peer.expect(m.Undeliverable)
    for _ in range(100):
        assert len(deaf.expect(m.Undeliverable).reason) == 100_000
    deaf.close()


def test_idle_raylet_sleeps(node: NodeChild, peer: Peer, leak_check: LeakCheck) -> None:
    (raylet,) = leak_check.processes("hpcray-raylet")

    def switches() -> int:
        with open(f"/proc/{raylet}/status", encoding="ascii") as lines:
            return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary"))

    before, start = switches(), time.monotonic()
    time.sleep(2.0)
    per_second = (switches() - before) / (time.monotonic() - start)
    assert per_second < 20, "its tick alone should wake it"
