"""An object crosses the link of each switch once, whatever the order in which nodes request it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcray.common.labels import Place, nearness
from hpcray.core.object_store.stored_object import ROOT, BroadcastTree, PullState

places = st.lists(st.sampled_from([("s0", f"p{i // 3}", f"s{i}") for i in range(9)]), min_size=1, max_size=40)


@given(places, st.sampled_from([1, 8, 200]), st.data())
def test_one_way_into_each_switch(of_node: list[Place], chunks: int, data: st.DataObject) -> None:
    root = data.draw(st.sampled_from(of_node))
    tree, place = BroadcastTree(chunks, root), {ROOT: root, **dict(enumerate(of_node))}
    joined: list[int] = [ROOT]
    crossings: dict[Place, int] = {}
    for order, node in enumerate(data.draw(st.permutations(range(len(of_node)))), 1):
        parent = tree.join(node, order, (), place[node])
        assert parent in joined, "who sends has joined before, and so has a lower number"
        joined.append(node)
        for level in range(nearness(place[parent], place[node]) + 1, 4):
            switch = place[node][:level]
            crossings[switch] = crossings.get(switch, 0) + 1
    assert all(count == 1 for count in crossings.values()), crossings
    assert not any(root[: len(switch)] == switch for switch in crossings), "never back to where it came from"


def test_up_to_two_further_switches_get_it_from_the_first_one() -> None:
    """A switch that passed it on would have it on its link a second time, on its way out."""
    tree, of_node = BroadcastTree(200, ("s0", "s1")), {1: "s1", 2: "s2", 3: "s2", 4: "s3", 5: "s3", 6: "s1"}
    parents = {node: tree.join(node, node, (), ("s0", of_node[node])) for node in (3, 5, 4, 2, 1, 6)}
    assert parents == {3: ROOT, 5: ROOT, 4: 5, 2: 3, 1: ROOT, 6: 1}


@given(places, st.data())
def test_dead_nodes_send_nothing(of_node: list[Place], data: st.DataObject) -> None:
    tree, dead, joined = BroadcastTree(8, of_node[0]), set[int](), [ROOT]
    for order, node in enumerate(range(len(of_node)), 1):
        parent = tree.join(node, order, dead, of_node[node])
        assert parent in joined and parent not in dead
        joined.append(node)
        dead |= data.draw(st.sets(st.sampled_from(joined[1:])))


def test_without_places_nothing_has_changed() -> None:
    """A chain, until it has a quarter as many links as the object has chunks; then each gets a second child."""
    tree = BroadcastTree(16)
    assert [tree.join(node, node, ()) for node in range(1, 10)] == [ROOT, 1, 2, 3, ROOT, 5, 6, 7, 1]


def test_the_nearest_source_is_asked_first_and_equal_ones_take_turns() -> None:
    near = {1: 1, 2: 3, 3: 2, 4: 3}.__getitem__
    for start, expected in ((0, [2, 4, 3, 1]), (2, [4, 2, 3, 1])):
        pull = PullState()
        pull.add_sources([1, 2, 3, 4], start, near)
        assert pull.sources_left == expected
