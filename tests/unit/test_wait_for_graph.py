"""Circles of waits: which nodes of a graph can never end, which circle is named, and when it is certain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcray.hangs.hang_detector import SECOND_LOOK, CircleDetector, CircleLook
from hpcray.hangs.messages import CallLook, ProcessLook, ThreadLook, WaitLook
from hpcray.hangs.wait_for_graph import CALL, OBJECT, WAIT, GraphNode, WaitFacts, find_circle, stuck_nodes

PROGRAM, ONE, TWO = (bytes([0, 0, 0, 0, 0, 0, 0, number]) for number in (9, 1, 2))


def oid(owner: bytes, number: int) -> bytes:
    return owner + number.to_bytes(5, "big") + b"\0\0\0"


def look(proc, waits=(), calls=(), others=(), slots=1, driver=False, actor=b"", holds=()):
    return ProcessLook(
        proc, 1, "worker", driver, 0, list(waits), list(calls), list(others), slots, actor, "A", list(holds)
    )


def sent(what, task, worker):
    return {"what": what, "state": "sent", "task": task, "worker": worker, "open": []}


def two_actors(*, timed=False, others=(), slots=1, program_others=()):
    """The program waits for ONE.f, that for TWO.g, and that for ONE.h, which is queued behind ONE.f."""
    f, g, h = oid(PROGRAM, 1), oid(ONE, 1), oid(TWO, 1)
    facts = WaitFacts()
    facts.looks = {
        PROGRAM: look(PROGRAM, [WaitLook(1, 1, [f], False, b"", "p.py:9")], driver=True, others=program_others),
        ONE: look(
            ONE, [WaitLook(1, 1, [g], False, f[:13], "p.py:3")], [CallLook(f[:13], "A.f", 9.0, 1)], slots=slots,
            actor=b"one",
        ),
        TWO: look(
            TWO, [WaitLook(1, 1, [h], timed, g[:13], "p.py:6")], [CallLook(g[:13], "B.g", 8.0, 1)], others=others,
            actor=b"two",
        ),
    }  # fmt: skip
    facts.statuses = {
        f: sent("call A.f", f[:13], ONE),
        g: sent("call B.g", g[:13], TWO),
        h: sent("call A.h", h[:13], ONE),
    }
    return facts, h


def circle_of(facts):
    graph = facts.graph()
    stuck = stuck_nodes(graph)
    return find_circle(graph, stuck) if facts.programs_are_stuck(stuck) else None


def test_a_circle_of_calls_is_closed_by_the_youngest_wait():
    facts, closing = two_actors()
    circle = circle_of(facts)
    assert circle is not None and circle.object == closing and circle.queued
    assert len(circle.chain) == 2
    assert circle.chain[0].startswith("B.g in actor A") and "p.py:6 for call A.h" in circle.chain[0]
    assert "p.py:3 for call B.g" in circle.chain[1]


def test_what_may_end_by_itself_is_no_circle():
    busy = ThreadLook("running", "", 0, "", "p.py:1")
    assert circle_of(two_actors(timed=True)[0]) is None, "a wait with a timeout"
    assert circle_of(two_actors(others=[busy])[0]) is None, "another thread works in the process"
    assert circle_of(two_actors(slots=2)[0]) is None, "the actor has room for another call"
    assert circle_of(two_actors(program_others=[busy])[0]) is None, "the program has a thread that does something"
    facts, _ = two_actors()
    facts.looks[ONE] = None
    assert circle_of(facts) is None, "a process does not answer"
    facts, closing = two_actors()
    facts.statuses[closing] = {**facts.statuses[closing], "state": "ready", "worker": b""}
    assert circle_of(facts) is None, "the object is ready"


def test_one_that_works_and_knows_an_actor_of_the_circle_may_end_it():
    facts, _ = two_actors()
    circle = circle_of(facts)
    busy = ThreadLook("running", "", 0, "", "p.py:1")
    third = bytes(7) + b"\x03"
    facts.looks[third] = look(third, others=[busy], holds=[b"four"])
    assert not facts.may_interfere(circle)
    facts.looks[third] = look(third, others=[busy], holds=[b"two"])
    assert facts.may_interfere(circle)


def test_only_what_is_needed_counts():
    """`wait(num_returns=1)` of a stuck object and one that is made; `get` of both."""
    stuck, made = (OBJECT, b"stuck", 0), (OBJECT, b"made", 0)
    graph = {
        stuck: GraphNode(1, ((CALL, b"c", 0),)),
        made: GraphNode(),
        (CALL, b"c", 0): GraphNode(1, ((WAIT, b"p", 1),)),
        (WAIT, b"p", 1): GraphNode(1, (stuck,)),
        (WAIT, b"any", 1): GraphNode(1, (stuck, made)),
        (WAIT, b"all", 1): GraphNode(2, (stuck, made)),
        (WAIT, b"unknown", 1): GraphNode(1, ((OBJECT, b"elsewhere", 0),)),
    }
    found = stuck_nodes(graph)
    assert (WAIT, b"all", 1) in found and stuck in found
    assert not found & {(WAIT, b"any", 1), (WAIT, b"unknown", 1), made}


keys = st.integers(0, 11).map(lambda number: (WAIT if number % 2 else OBJECT, bytes([number]), 0))
graphs = st.dictionaries(
    keys, st.lists(keys, max_size=4).flatmap(lambda of: st.integers(0, 4).map(lambda n: GraphNode(n, tuple(of))))
)


@given(graphs)
def test_stuck_is_what_no_order_of_ends_can_free(graph):
    """Against the definition: whatever can end does so, again and again, until nothing changes."""
    ended = set()
    while True:
        more = {
            key
            for key, node in graph.items()
            if key not in ended and sum(other in ended or other not in graph for other in node.of) >= node.needs
        }
        if not more:
            break
        ended |= more
    assert stuck_nodes(graph) == set(graph) - ended


@given(graphs)
def test_a_circle_is_one_of_stuck_nodes_that_depend_on_each_other(graph):
    stuck = stuck_nodes(graph)
    circle = find_circle(graph, stuck)
    if circle is not None:
        for key, following in zip(circle.keys, (*circle.keys[1:], circle.keys[0]), strict=True):
            assert key in stuck and following in graph[key].of
        assert circle.object == circle.keys[1 % len(circle.keys)][1]


def test_certain_is_what_two_looks_find_unchanged():
    circle = circle_of(two_actors()[0])
    stamps = ((ONE, 7), (TWO, 8))
    seen = CircleLook(circle, stamps)
    watch = CircleDetector()
    assert watch.looked(0.0, seen) is None
    assert watch.looked(SECOND_LOOK - 0.1, seen) is None, "too soon"
    assert watch.looked(SECOND_LOOK, seen) is circle
    assert watch.looked(SECOND_LOOK + 1, seen) is None, "it was ended once"


def test_a_change_between_two_looks_begins_anew():
    circle = circle_of(two_actors()[0])
    for between in (
        CircleLook(None),
        CircleLook(circle, ((ONE, 7), (TWO, 9))),
        CircleLook(circle, ((ONE, 7), (TWO, 8)), "a driver is attached"),
    ):
        watch = CircleDetector()
        seen = CircleLook(circle, ((ONE, 7), (TWO, 8)))
        assert watch.looked(0.0, seen) is None
        assert watch.looked(3.0, between) is None
        assert watch.looked(SECOND_LOOK + 0.5, seen) is None
        assert watch.looked(2 * SECOND_LOOK + 1, seen) is circle


def test_looks_are_rarer_where_they_cost_more():
    watch = CircleDetector()
    assert watch.period(0.0) <= SECOND_LOOK
    assert watch.period(0.02) >= 20.0, "a look that takes 20 ms costs a thousandth of a core"
