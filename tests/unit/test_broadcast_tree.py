"""The tree of the nodes that want one object at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcray.core.object_store.stored_object import ROOT, BroadcastTree


def grow(nodes: int, chunks: int) -> dict[int, int]:
    """Node to its parent."""
    tree = BroadcastTree(chunks)
    return {node: tree.join(node, node + 1, ()) for node in range(nodes)}


def depth(parents: dict[int, int], node: int) -> int:
    return 0 if node == ROOT else 1 + depth(parents, parents[node])


def test_few_readers_of_a_large_object_form_a_chain() -> None:
    assert grow(8, 128) == {0: ROOT, **{node: node - 1 for node in range(1, 8)}}


@pytest.mark.parametrize("nodes, chunks", [(1000, 128), (1000, 1), (50, 1), (300, 12)])
def test_many_readers_make_a_flat_tree_in_which_no_node_has_more_than_two_children(nodes: int, chunks: int) -> None:
    parents = grow(nodes, chunks)
    assert max(list(parents.values()).count(parent) for parent in parents.values()) <= 2
    limit = max(chunks // 4, nodes.bit_length() + 1)
    assert max(depth(parents, node) for node in parents) <= limit


@given(st.integers(1, 200), st.integers(1, 64), st.sets(st.integers(0, 199)))
def test_a_parent_joined_before_and_is_alive(nodes: int, chunks: int, dead: set[int]) -> None:
    tree = BroadcastTree(chunks)
    joined = {ROOT}
    for node in range(nodes):
        gone = {other for other in dead if other < node}
        assert tree.join(node, node + 1, gone) in joined - gone
        joined.add(node)
