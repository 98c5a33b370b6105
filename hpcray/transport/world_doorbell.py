"""The doorbell of a world of several ranks that has joined a job: its engine knows nodes by number, its MPI by rank."""

from __future__ import annotations

from collections.abc import Callable

from hpcray.transport.ucx_engine import UcxEngine


class WorldDoorbell:
    """The methods of a `UcxEngine` that `MpiControl` uses, with the ranks of one world instead of the numbers of nodes.

    Args:
        engine: shared by all nodes that this one is connected to.
        first: the number of this world's rank 0.
        ranks: how many ranks the world has.

    Attributes:
        sent_count: number of messages sent to a rank so far.
    """

    def __init__(self, engine: UcxEngine, first: int, ranks: int) -> None:
        self.sent_count: Callable[[int], int] = lambda rank: 0
        self._engine = engine
        self._first = first
        self._ranks = range(ranks)
        engine.sent_count = self._sent_to_node
        self.fileno = engine.fileno
        self.progress = engine.progress
        self.hungry = engine.hungry
        self.arm = engine.arm

    def _sent_to_node(self, node: int) -> int:
        rank = node - self._first
        return self.sent_count(rank) if rank in self._ranks else 0

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
