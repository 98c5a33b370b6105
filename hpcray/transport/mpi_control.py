"""Control messages over MPI, with the UCX doorbell to sleep on where there is one.

Receives are never posted ahead and never name a source: a directed receive from a dead rank stays pending for ever.
`Improbe` from any source hands over whatever has come. After start-up there are no collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcray.common.memory import BufferPool
from hpcray.transport.base import FOREVER, Backoff, PeerLost, ReceiveBuffers, Received, TransportError
from hpcray.transport.startup import finalize_mpi, leave_pmix
from hpcray.transport.ucx_engine import UcxEngine

if TYPE_CHECKING:
    from mpi4py import MPI as mpi


# ------------------------------------------------------------ world doorbell
# The doorbell of a world of several ranks that has joined a job: its engine knows nodes by number, its MPI by rank.


class WorldDoorbell:
    """The methods of a `UcxEngine` that `MpiControl` uses, with the ranks of one world instead of the numbers of nodes.

    Args:
        engine: shared by all nodes that this one is connected to.
        first: the number of this world's rank 0.
        ranks: how many ranks the world has.

    Attributes:
        sent_counts: each returns the number of messages sent to a rank so far.
    """

    def __init__(self, engine: UcxEngine, first: int, ranks: int) -> None:
        self.sent_counts: list[Callable[[int], int]] = []
        self._engine = engine
        self._first = first
        self._ranks = range(ranks)
        engine.sent_counts.append(self._sent_to_node)
        self.fileno = engine.fileno
        self.progress = engine.progress
        self.hungry = engine.hungry
        self.arm = engine.arm

    def _sent_to_node(self, node: int) -> int:
        rank = node - self._first
        return sum(sent(rank) for sent in self.sent_counts) if rank in self._ranks else 0

    def ripe(self) -> bool:
        """See `UcxEngine`."""
        return self._engine.ripe()

    def ring(self, rank: int, count: int) -> None:
        """Wake a rank of this world."""
        self._engine.ring(self._first + rank, count)

    def heard(self) -> list[tuple[int, int]]:
        """Bells of this world's ranks."""
        return [(node - self._first, count) for node, count in self._engine.heard()]

    def failed(self) -> list[tuple[int, str]]:
        """Peers that UCX newly found dead. Of other worlds too: their ranks are none of this world."""
        return [(node - self._first, why) for node, why in self._engine.failed()]

    def connected(self) -> int:
        """Number of ranks of this world that this one is connected to."""
        return sum(self._engine.knows(self._first + rank) for rank in self._ranks)


# ------------------------------------------------------------ mpi control


_TAG = 1
_LONGEST = (1 << 31) - 1  # bytes of a message
_PER_POLL = 256  # messages received in one `poll`
_SHORT = 1 << 16  # bytes; longer messages get a buffer of their own
_SPARE = 8  # buffers kept for later
_ARMINGS = 3  # attempts to arm the descriptor in one `arm`
_CLOSE = 0.005  # seconds between two messages of a crowd
_CROWD = 4  # messages after which more are expected at once


class MpiControl:
    """The `ControlTransport` over MPI.

    Args:
        module: `mpi4py.MPI`, initialized.
        comm: communicator whose ranks are the nodes; its errors must return.
        bell: what wakes a sleeping raylet; None: it polls with a back-off of up to 10 ms.
    """

    def __init__(self, module: Any, comm: mpi.Intracomm, bell: UcxEngine | WorldDoorbell | None) -> None:
        self._mpi = module
        self._comm = comm
        self._bell = bell
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._byte = module.BYTE
        self._any = module.ANY_SOURCE
        self._status = module.Status()
        self._sent = [0] * self.size
        if bell is not None:
            bell.sent_counts.append(lambda node: self._sent[node] if node < self.size else 0)  # nodes of other worlds
        self._received = [0] * self.size
        self._promised = [0] * self.size
        self._owing: set[int] = set()
        self._sending: dict[int, deque[tuple[mpi.Request, Received]]] = {}
        self._late: dict[int, deque[tuple[mpi.Request, memoryview, memoryview | None]]] = {}
        self._arrived: list[tuple[int, Received]] = []
        self._buffers: ReceiveBuffers = BufferPool()
        self._scratch = memoryview(bytearray(_SHORT))
        self._spare: list[memoryview] = []
        self._dead: dict[int, str] = {}
        self._newly_dead: list[tuple[int, str]] = []
        self._stuck: list[Any] = []
        self._backoff = Backoff()
        self._crowd = 0
        self._whole = False
        self._slept = False

    def send(self, dest: int, data: Received, wake: bool = True) -> None:
        why = self._dead.get(dest)
        if why is not None:
            raise PeerLost(dest, why)
        if len(data) > _LONGEST:
            raise ValueError(f"a control message of {len(data)} bytes to rank {dest}: the most is {_LONGEST}")
        try:
            request = self._comm.Isend((data, self._byte), dest, _TAG)
            done = request.Test()
        except self._mpi.Exception as error:
            self._lose(dest, f"MPI send failed: {error}")
            raise PeerLost(dest, self._dead[dest]) from None
        if not done:
            self._sending.setdefault(dest, deque()).append((request, data))
        self._moved()
        self._sent[dest] += 1
        if self._bell is not None and wake:
            self._bell.ring(dest, self._sent[dest])

    def receive_into(self, buffers: ReceiveBuffers) -> None:
        self._buffers = buffers

    def _reap(self) -> None:
        # Sends to one peer finish in order, and a Test that fails costs as much as a poll: look at the oldest only.
        for dest in list(self._sending):
            sending = self._sending[dest]
            try:
                while sending and dest not in self._dead and sending[0][0].Test():
                    sending.popleft()
                    self._backoff.touch()
            except self._mpi.Exception as error:
                self._lose(dest, f"MPI send failed: {error}")
            if not sending or dest in self._dead:
                self._stuck.extend(sending)
                del self._sending[dest]

    def poll(self) -> list[tuple[int, Received]]:
        if self._sending:
            self._reap()
        if self._late:
            self._advance()
        again, self._slept = self._slept or bool(self._owing), False
        for _ in range(_PER_POLL):
            if not self._next():
                if not again:
                    break
                again = False  # MPI looks first and moves on then: what a bell has announced, it finds the second time
        arrived = self._arrived
        if arrived:
            self._arrived = []
            self._moved()
        return arrived

    def _moved(self) -> None:
        # A heartbeat now and then is no reason to stay awake for the next one.
        self._crowd = self._crowd + 1 if self._backoff.silence() < _CLOSE else 0
        self._backoff.touch()

    def _next(self) -> bool:
        status = self._status
        try:
            message = self._comm.Improbe(self._any, _TAG, status)
            if message is None:
                return False
            source = status.Get_source()
            size = status.Get_count(self._byte)
            view = self._scratch[:size] if size <= _SHORT else self._buffers.take(size)
            request = message.Irecv((view, self._byte))
            self._received[source] += 1
            if source not in self._late and request.Test():
                self._arrived.append((source, bytes(view) if size <= _SHORT else view.toreadonly()))
                return True
            # Its bytes are still coming (a long message), or it must wait its turn behind one like that.
            whole = self._scratch if size <= _SHORT else None
            self._late.setdefault(source, deque()).append((request, view, whole))
            if whole is not None:
                self._scratch = self._spare.pop() if self._spare else memoryview(bytearray(_SHORT))
        except self._mpi.Exception as error:
            for rank in acknowledge(self._mpi, self._comm, error):
                self._lose(rank, "MPI reports its process as failed")
        return True

    def _advance(self) -> None:
        for source in list(self._late):
            waiting = self._late[source]
            while waiting:
                request, view, whole = waiting[0]
                try:
                    if not request.Test():
                        break
                except self._mpi.Exception as error:
                    self._lose(source, f"MPI receive failed: {error}")
                    break
                waiting.popleft()
                self._arrived.append((source, view.toreadonly() if whole is None else bytes(view)))
                if whole is not None and len(self._spare) < _SPARE:
                    self._spare.append(whole)
                self._backoff.touch()
            if not waiting or source in self._dead:
                self._stuck.extend(waiting)
                del self._late[source]

    def lost(self) -> list[tuple[int, str]]:
        if self._bell is not None:
            for node, why in self._bell.failed():
                self._lose(node, why)
        found, self._newly_dead = self._newly_dead, []
        return found

    def forget(self, rank: int, why: str) -> None:
        self._dead.setdefault(rank, why)
        self._owing.discard(rank)

    def _lose(self, rank: int, why: str) -> None:
        if rank not in self._dead:
            self.forget(rank, why)
            self._newly_dead.append((rank, why))

    def fileno(self) -> int | None:
        return None if self._bell is None else self._bell.fileno()

    def arm(self) -> bool:
        bell = self._bell
        if bell is not None and not self._arm(bell):
            return False
        try:
            if self._arrived or self._comm.Iprobe(self._any, _TAG):
                return False
        except self._mpi.Exception:
            return False
        self._slept = True
        return True

    def _arm(self, bell: UcxEngine | WorldDoorbell) -> bool:
        # What we have just sent keeps UCX busy for a moment: to look again at once costs less than another turn.
        for _ in range(_ARMINGS):
            overtaken = False
            bell.progress()
            for rank, count in bell.heard():
                self._promised[rank] = max(count, self._promised[rank])
                if self._received[rank] < count and rank not in self._dead:
                    self._owing.add(rank)
                    self._backoff.touch()
                    overtaken = True
            if overtaken or bell.hungry():
                return False
            if bell.arm():
                return not bell.ripe()
        return False

    def patience(self) -> float:
        if self._arrived:
            return 0.0
        if self._owing:
            self._owing = {rank for rank in self._owing if self._received[rank] < self._promised[rank]}
        if self._sending or self._late or self._owing or not self._wakes():
            return self._backoff.delay()
        return 0.0 if self._crowd >= _CROWD and self._backoff.lively() else FOREVER

    def pending(self) -> bool:
        return bool(self._sending or self._late)

    def _wakes(self) -> bool:
        """Whether every peer can ring our bell: a peer connects before it sends, all but the very first messages."""
        if not self._whole and self._bell is not None:
            self._whole = self._bell.connected() >= self.size - 1
        return self._whole

    def close(self, abort: bool = False) -> None:
        if abort:
            leave_pmix()
        else:
            finalize_mpi(self._mpi)


def acknowledge(module: Any, comm: mpi.Intracomm, error: mpi.Exception) -> list[int]:
    """With ULFM, probing any source fails until the dead are acknowledged: do that.

    Returns:
        All ranks of `comm` known dead.

    Raises:
        TransportError: `error` had another cause.
    """
    if error.Get_error_class() not in (module.ERR_PROC_FAILED, module.ERR_PROC_FAILED_PENDING):
        raise TransportError(f"MPI cannot receive any more: {error}") from None
    failed = comm.Get_failed()
    ranks = list(failed.Translate_ranks(None, comm.Get_group()))
    comm.Ack_failed(len(ranks))
    return ranks
