"""Orders in which neighbours follow each other, and the drawing of a network."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcray.common.labels import Place
from hpcray.compat import train_network
from hpcray.mpi import place
from hpcray.topology.node_order import draw, in_order, nearest_nodes, network

PLACES: dict[str, Place] = {"a": ("s0", "s1"), "b": ("s0", "s2"), "c": ("s0", "s1"), "d": ("s9", "s8"), "x": ()}


def test_neighbours_follow_each_other() -> None:
    assert in_order(["a", "b", "x", "d", "c"], PLACES) == ["a", "c", "b", "d", "x"]
    assert in_order(["b", "a", "b", "c", "a"], PLACES) == ["b", "b", "a", "c", "a"], "several workers of a node"
    assert in_order(["n3", "n1"], {}) == ["n3", "n1"], "nothing is known: the old order"


@given(st.lists(st.sampled_from([*PLACES]), max_size=12))
def test_each_switch_is_entered_once(nodes: list[str]) -> None:
    found = in_order(nodes, PLACES)
    assert sorted(found) == sorted(nodes)
    for level in (1, 2):
        switches = [PLACES[node][:level] for node in found if PLACES[node]]
        changes = sum(one != other for one, other in pairwise(switches))
        assert changes == max(0, len(set(switches)) - 1)


def test_workers_of_train_follow_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sorts the workers of each node by their GPUs, and leaves the nodes in the order in which they come."""
    came = [SimpleNamespace(metadata=SimpleNamespace(node_id=node), number=n) for n, node in enumerate("abcdac")]
    monkeypatch.setattr(train_network, "rank_order", lambda nodes: in_order(list(nodes), PLACES))
    group = type("WorkerGroup", (), {"_sort_workers_by_gpu_id_grouped_by_node": staticmethod(lambda workers: workers)})
    train_network.worker_group(SimpleNamespace(WorkerGroup=group))  # type: ignore[arg-type]
    ranks = group._sort_workers_by_gpu_id_grouped_by_node(came)  # type: ignore[attr-defined]
    assert [worker.metadata.node_id for worker in ranks] == ["a", "a", "c", "c", "b", "d"]
    assert [worker.number for worker in ranks] == [0, 4, 2, 5, 1, 3]


def test_ranks_take_few_switches_and_few_nodes() -> None:
    counts = {"a": 2, "b": 4, "c": 2, "d": 1}
    assert nearest_nodes(counts, 4, PLACES) == {"b": 4}
    assert nearest_nodes({**counts, "b": 1}, 4, PLACES) == {"a": 2, "c": 2}
    assert nearest_nodes(counts, 8, PLACES) == {"a": 2, "c": 2, "b": 4}
    assert nearest_nodes(counts, 10, PLACES) == {}


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 4), min_size=1), st.integers(1, 12))
def test_without_places_ranks_are_placed_as_before(counts: dict[str, int], ranks: int) -> None:
    """The nodes with most room, in their order."""
    left, expected = ranks, dict[str, int]()
    for node, count in sorted(counts.items(), key=lambda item: -item[1]):
        if share := min(count, left):
            expected[node], left = share, left - share
    found = place(ranks, counts, counts, dict.fromkeys(counts, 0))
    if left:
        assert found == []
    elif any(count >= ranks for count in counts.values()):
        assert found == [(None, ranks)]
    else:
        assert found == [(node, expected[node]) for node in counts if node in expected]


def row(index: int, host: str, path: str = "", alive: bool = True, **labels: str) -> dict[str, Any]:
    given = {"hpcray.io/switch-path": path} if path else {}
    given |= {f"hpcray.io/{key}": text for key, text in labels.items()}
    return {"Index": index, "NodeID": f"{index:02x}", "NodeManagerHostname": host, "Alive": alive, "Labels": given}


def test_drawing() -> None:
    rows = [row(0, "n1", "s0.s1", block="b1"), row(1, "n2", "s0.s1"), row(2, "n3", "s0.s2", alive=False), row(3, "x")]
    assert draw(network(rows)) == [
        "s0",
        "├─ s1",
        "│  ├─ n1 (node 0, block b1)",
        "│  └─ n2 (node 1)",
        "└─ s2",
        "   └─ n3 (node 2, dead)",
        "place unknown",
        "└─ x (node 3)",
    ]
    unknown = draw(network([row(0, "n1")]))
    assert unknown[0] == "Nothing is known about the network of n1 (node 0)." and unknown[1].startswith("hint: ")
