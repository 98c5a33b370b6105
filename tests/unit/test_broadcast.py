"""Sending one stream to all nodes: the tree, and each node's part in it, with messages in any order of arrival."""

from __future__ import annotations

import random
from collections import deque

import pytest

from hpcray.runtime_env import broadcast_relay as tree


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 13, 64, 100])
def test_tree_reaches_everybody_once_and_is_shallow(size: int) -> None:
    reached = [child for rank in range(size) for child in tree.children(rank, size)]
    assert sorted(reached) == list(range(1, size))
    assert all(tree.parent(child) == rank for rank in range(size) for child in tree.children(rank, size))
    assert len(tree.children(0, size)) == (size - 1).bit_length()
    for rank in range(size):
        depth, at = 0, rank
        while at:
            depth, at = depth + 1, tree.parent(at)
        assert depth <= (size - 1).bit_length()
    heights = tree.heights([0, *(tree.parent(rank) for rank in range(1, size))])
    for rank in range(size):
        assert heights[rank] == max((heights[child] + 1 for child in tree.children(rank, size)), default=0)


def relay(rank: int, size: int) -> tree.Relay:
    return tree.Relay(rank, tree.parent(rank), tree.children(rank, size))


@pytest.mark.parametrize("size", [1, 2, 5, 40, 200])
def test_a_tree_by_places_enters_each_switch_once(size: int) -> None:
    """Ranks of four switches of two pods, in turn; two do not know their place."""
    places = [("s0", f"p{rank % 2}", f"s{rank % 4}") for rank in range(size)]
    for rank in {size // 3, size - 1} - {0}:
        places[rank] = ()  # type: ignore[call-overload]
    parents = tree.near_parents(places)
    assert parents[0] == 0 and all(parents[rank] < rank for rank in range(1, size)), "who sends is no descendant"
    most = max(parents[1:].count(sender) for sender in range(size)) if size > 1 else 0
    assert most <= 2 * 4, "two in each of its switches"
    for level in (1, 2, 3):
        entered = [
            places[rank][:level] for rank in range(1, size) if places[parents[rank]][:level] != places[rank][:level]
        ]
        known = [switch for switch in entered if switch]
        assert len(known) == len(set(known)) and places[0][:level] not in known


class Net:
    """All nodes of a job; each pair's messages keep their order, pairs take turns at random."""

    def __init__(self, size: int, chunks: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.relays = [relay(rank, size) for rank in range(size)]
        self.wires: dict[tuple[int, int], deque[tree.Effect]] = {}
        self.have: list[list[int]] = [[] for _ in range(size)]
        self.unacked: dict[tuple[int, int], int] = {}
        self.most = 0
        self.using: list[int] = []
        self.sends = [0] * size
        self.chunks = chunks

    def do(self, rank: int, effects: list[tree.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, tree.Complete):
                assert self.have[rank] == list(range(self.chunks)) == list(range(effect.count))
                self.using.append(rank)
                continue
            if isinstance(effect, tree.Pass):
                assert effect.index in self.have[rank], "passed on before it was there"
                self.unacked[rank, effect.dest] = self.unacked.get((rank, effect.dest), 0) + 1
                self.most = max(self.most, self.unacked[rank, effect.dest])
                self.sends[rank] += 1
            self.wires.setdefault((rank, effect.dest), deque()).append(effect)

    def step(self) -> bool:
        """Deliver one message, or end one node's use of the stream. False: nothing is left to happen."""
        open_wires = [pair for pair, wire in self.wires.items() if wire]
        choices: list[tuple[int, int]] = open_wires + [(rank, -1) for rank in self.using]
        if not choices:
            return False
        source, dest = self.random.choice(choices)
        if dest < 0:
            self.using.remove(source)
            self.do(source, self.relays[source].used())
            return True
        effect, relay = self.wires[source, dest].popleft(), self.relays[dest]
        if isinstance(effect, tree.Pass):
            self.have[dest].append(effect.index)
            self.unacked[source, dest] -= 1
            self.do(source, self.relays[source].acked(dest))  # an acknowledgement that travels in no time
            self.do(dest, relay.stored())
        elif isinstance(effect, tree.End):
            self.do(dest, relay.ended(effect.count))
        elif isinstance(effect, tree.Done):
            self.do(dest, relay.done(source))
        elif isinstance(effect, tree.Go):
            assert all(sorted(have) == list(range(self.chunks)) for have in self.have), "before everybody is done"
            self.do(dest, relay.go())
        elif isinstance(effect, tree.Fail):
            self.do(dest, relay.failed(effect.reason, source))
        return True


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 33])
@pytest.mark.parametrize("chunks", [0, 1, 3, 20])
def test_everybody_gets_everything_and_leaves_together(size: int, chunks: int) -> None:
    net = Net(size, chunks, seed=size * 100 + chunks)
    for index in range(chunks):
        net.have[0].append(index)
        net.do(0, net.relays[0].stored())
        for _ in range(net.random.randrange(5)):
            net.step()
    net.do(0, net.relays[0].ended(chunks))
    while net.step():
        pass
    assert all(relay.over and not relay.failure for relay in net.relays)
    assert net.most <= tree.WINDOW
    assert sum(net.sends) == chunks * (size - 1), "each node receives each chunk once"
    assert net.sends[0] == chunks * (size - 1).bit_length()


@pytest.mark.parametrize("culprit", [0, 1, 6, 15])
def test_one_failure_ends_a_broadcast_on_all_nodes(culprit: int) -> None:
    net = Net(16, 5, seed=culprit)
    for index in range(3):
        net.have[0].append(index)
        net.do(0, net.relays[0].stored())
    for _ in range(20):
        net.step()
    net.do(culprit, net.relays[culprit].failed("disk full"))
    while net.step():
        pass
    assert {relay.failure for relay in net.relays} == {"disk full"}


def test_a_relay_names_the_nodes_for_which_it_waits() -> None:
    root, leaf = relay(0, 4), relay(3, 4)
    assert root.waits_for() == "the archive"
    assert leaf.waits_for() == "node 2 to send chunk 0"
    root.stored()
    root.ended(1)
    assert root.waits_for() == "nodes 1, 2"
    root.acked(1)
    assert root.waits_for() == "nodes 2"
    leaf.stored()
    leaf.ended(1)
    assert leaf.waits_for() == "this node's disk"
    leaf.used()
    assert leaf.waits_for() == "the other nodes"
