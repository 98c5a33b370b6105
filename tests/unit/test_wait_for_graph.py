"""Circles of waits: which nodes of a graph can never end, which circle is named, and when it is certain."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hpcray.hangs.messages import COROUTINE, QUEUE, CallLook, ProcessLook, ThreadLook, WaitLook
from hpcray.hangs.stillness import SECOND_LOOK, CircleDetector, CircleLook
from hpcray.hangs.wait_for_graph import (
    CALL,
    OBJECT,
    WAIT,
    GraphNode,
    ResourceHolders,
    WaitFacts,
    find_circle,
    find_dead_end,
    stuck_nodes,
)
from hpcray.hangs.watcher import _keep_stacks

PROGRAM, ONE, TWO = (bytes([0, 0, 0, 0, 0, 0, 0, number]) for number in (9, 1, 2))


def oid(owner: bytes, number: int) -> bytes:
    return owner + number.to_bytes(5, "big") + b"\0\0\0"


def look(proc, waits=(), calls=(), others=(), slots=1, driver=False, actor=b"", holds=()):
    return ProcessLook(
        proc, 1, "worker", driver, 0, list(waits), list(calls), list(others), slots, actor, "A", list(holds)
    )


def sent(what, task, worker):
    return {"what": what, "state": "sent", "task": task, "worker": worker, "open": []}


def two_actors(*, timeout=-1.0, others=(), slots=1, program_others=()):
    """The program waits for ONE.f, that for TWO.g, and that for ONE.h, which is queued behind ONE.f."""
    f, g, h = oid(PROGRAM, 1), oid(ONE, 1), oid(TWO, 1)
    facts = WaitFacts()
    facts.looks = {
        PROGRAM: look(PROGRAM, [WaitLook(1, 1, [f], -1.0, b"", "p.py:9")], driver=True, others=program_others),
        ONE: look(
            ONE, [WaitLook(1, 1, [g], -1.0, f[:13], "p.py:3")], [CallLook(f[:13], "A.f", 9.0, 1)], slots=slots,
            actor=b"one",
        ),
        TWO: look(
            TWO, [WaitLook(1, 1, [h], timeout, g[:13], "p.py:6")], [CallLook(g[:13], "B.g", 8.0, 1)], others=others,
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
    busy = ThreadLook("running", "", -1, 0, "", "p.py:1")
    assert circle_of(two_actors(timeout=3.0)[0]) is None, "a wait with a timeout"
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
    busy = ThreadLook("running", "", -1, 0, "", "p.py:1")
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


def test_a_task_that_waits_for_what_its_own_waiter_holds():
    """outer holds the only licence and waits for inner, which needs it."""
    outer, inner = oid(PROGRAM, 1), oid(ONE, 1)
    facts = WaitFacts()
    facts.looks = {
        PROGRAM: look(PROGRAM, [WaitLook(1, 1, [outer], -1.0, b"", "p.py:9")], driver=True),
        ONE: look(ONE, [WaitLook(1, 1, [inner], -1.0, outer[:13], "p.py:3")], [CallLook(outer[:13], "outer", 9.0, 1)]),
    }
    facts.statuses = {
        outer: sent("task outer", outer[:13], ONE),
        inner: {**sent("task inner", inner[:13], b""), "state": "queued", "resources": {"licence": 1.0}},
    }
    assert facts.wants_nodes() and circle_of(facts) is None
    facts.nodes = [ResourceHolders({"licence": 1.0}, {"licence": 0.0}, [(ONE, {"licence": 1.0})])]
    circle = circle_of(facts)
    assert circle is not None and circle.object == inner and "licence" in circle.chain[0]
    facts.nodes.append(ResourceHolders({"licence": 1.0}, {"licence": 1.0}, []))
    assert circle_of(facts) is None, "another node has what it needs"
    facts.nodes[1:] = [ResourceHolders({"licence": 1.0}, {}, [(TWO, {"licence": 1.0})])]
    assert TWO in facts.unknown_processes()
    facts.looks[TWO] = look(TWO, calls=[CallLook(b"other", "other", 1.0, 0)])
    assert circle_of(facts) is None, "another task holds it there, and may end"
    facts.nodes[1:] = [ResourceHolders({"licence": 0.0}, {}, [])]
    assert circle_of(facts) is not None, "a node that never had any does not matter"
    facts.looks[ONE] = look(ONE, facts.looks[ONE].waits, facts.looks[ONE].calls, actor=b"one")
    assert circle_of(facts) is None, "an actor keeps what it holds for other reasons, and may be killed"


def a_consumer(**fields):
    """The program waits for the call of a queue's actor, which waits for an item."""
    call = oid(PROGRAM, 1)
    waits = ThreadLook(COROUTINE, "", -1, 0, QUEUE, "queues.py:1 in get")
    facts = WaitFacts()
    facts.looks = {
        PROGRAM: look(PROGRAM, [WaitLook(1, 1, [call], -1.0, b"", "p.py:9")], driver=True),
        ONE: look(
            ONE, calls=[CallLook(call[:13], "_QueueActor.get", 9.0, 0, "queues.py:1 in get")], others=[waits],
            slots=1000, actor=b"one",
        ),
    }  # fmt: skip
    facts.statuses = {call: sent("call _QueueActor.get", call[:13], ONE)}
    return facts, call


def test_a_consumer_of_a_queue_is_hung_if_no_process_does_anything():
    facts, call = a_consumer()
    assert facts.waits_for_a_queue() and facts.nobody_acts()
    assert (WAIT, PROGRAM, 1) not in stuck_nodes(facts.graph()), "others may fill it"
    facts.sleeps = True
    graph = facts.graph()
    stuck = stuck_nodes(graph)
    end = find_dead_end(graph, stuck, (WAIT, PROGRAM, 1))
    assert facts.programs_are_stuck(stuck) and end is not None and end.object == call and not end.queued
    assert "p.py:9" in end.chain[0] and "_QueueActor.get" in end.chain[0]


def test_a_producer_that_works_or_waits_for_a_time_may_fill_the_queue():
    facts, _ = a_consumer()
    facts.looks[TWO] = look(TWO, others=[ThreadLook("timed", "", -1, 0, "", "p.py:2")])
    assert not facts.nobody_acts()
    facts.looks[TWO] = look(TWO, [WaitLook(1, 1, [oid(TWO, 1)], 5.0, b"", "p.py:2")])
    assert not facts.nobody_acts()
    facts.looks[TWO] = None
    assert not facts.nobody_acts(), "it does not answer"
    facts.looks[TWO] = look(TWO)
    assert facts.nobody_acts(), "an idle worker"


def test_stacks_that_cannot_be_kept_are_printed(tmp_path: Path) -> None:
    """The disk of the logs is full, or the file is there already: nothing else knows what the job did."""
    reason, stacks = ["why"], ["  a stack"]
    path = str(tmp_path / "logs" / "hang.txt")
    assert _keep_stacks(path, reason, stacks, True) == [f"  all stacks: {path}"]
    assert Path(path).read_text() == "why\n\n  a stack\n"
    again = _keep_stacks(path, reason, stacks, True)
    assert again[0] == "  a stack" and "the stacks cannot be written" in again[1]
    assert _keep_stacks(str(tmp_path / "hang.txt"), reason, stacks, False) == stacks
