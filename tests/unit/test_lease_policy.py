"""Which class a task is sorted into: by the bytes of its arguments, not by what all tasks share."""

from __future__ import annotations

from hpcray.common.ids import make_proc
from hpcray.core.core_worker.lease_manager import LeaseManager, LocalityLeasePolicy
from hpcray.core.core_worker.object_entry import INLINE, STORED, ObjectEntry
from hpcray.core.core_worker.task import FunctionDescriptor, PendingTask
from hpcray.protocol.messages import Message, Shape

HOME = 1
PLAIN = Shape((("CPU", 10_000),))


class Submitting:
    """Objects by name, and where their tasks go."""

    def __init__(self, nodes: int = 4) -> None:
        self.entries: dict[bytes, ObjectEntry] = {}
        self.sent: list[Message] = []
        self.client = LeaseManager(make_proc(HOME, 5), lambda _, msg: self.sent.append(msg), lambda *_: None, 0.1)
        self.locality = LocalityLeasePolicy(self.client, self.entries, HOME, nodes)
        self.function = FunctionDescriptor(b"f" * 16, "f", b"")
        self.count = 0

    def stored(self, name: str, size: int, *nodes: int) -> None:
        entry = self.entries[name.encode()] = ObjectEntry(None, 1)
        entry.state, entry.size, entry.nodes = STORED, size, list(nodes)

    def submit(self, *names: str, shape: Shape = PLAIN) -> str:
        self.count += 1
        slots = [name.encode() for name in names]
        task = PendingTask(self.count.to_bytes(13, "big"), self.function, "", b"", 1, None, slots or None, 0)
        klass = self.locality.scheduling_class(task, self.client.scheduling_class(shape))
        self.client.submit(task, klass)
        return klass.shape.strategy


def test_a_task_runs_where_most_bytes_of_its_arguments_are() -> None:
    me = Submitting()
    me.stored("a", 10, 2)
    me.stored("b", 15, 3)
    me.stored("c", 6, 2, 0)
    assert me.submit("a", "b") == "near:3"
    assert me.submit("c") in ("near:0", "near:2")
    assert me.submit() == ""
    assert me.submit("a", "c", "b") == "near:2", "sixteen bytes are more than fifteen"


def test_the_own_node_wins_a_tie_and_is_left_when_only_it_has_work() -> None:
    me = Submitting()
    me.stored("here", 10, HOME, 2)
    me.stored("there", 10, 3)
    assert me.submit("here") == "", "others may take what the driver itself has made"
    assert me.submit("there") == "near:3"
    me.stored("here too", 10, HOME, 2)
    assert me.submit("here too") == f"near:{HOME}", "now node 3 has work of its own"


def test_an_argument_that_all_tasks_share_binds_none_of_them_to_a_node() -> None:
    me = Submitting()
    me.stored("model", 1000, 2)
    assert [me.submit("model") for _ in range(4)] == ["near:2", "", "", ""]
    for node in range(4):
        me.stored(f"block {node}", 10, node)
    assert [me.submit("model", f"block {node}") for node in (3, 0, 2)] == ["near:3", "near:0", "near:2"]


def test_no_locality_class_is_made_where_it_makes_no_difference() -> None:
    me = Submitting()
    me.stored("a", 10, 2)
    small = me.entries[b"small"] = ObjectEntry(None, 1)
    small.state = INLINE
    assert me.submit("small") == "" and me.submit("nobody knows") == ""
    assert me.submit("a", shape=Shape(PLAIN.resources, "SPREAD")) == "SPREAD"
    alone = Submitting(nodes=1)
    alone.stored("a", 10, 2)
    assert alone.submit("a") == ""


def test_bytes_behind_the_same_switch_count_for_each_link_that_they_need_not_cross() -> None:
    me = Submitting()
    for node, place in enumerate(("s0.s1", "s0.s1", "s0.s2", "s0.s2")):
        me.locality.cluster_grew({node: tuple(place.split("."))})
    me.stored("a", 10, 0)
    me.stored("b", 10, 2)
    me.stored("c", 10, 3)
    assert me.submit("a", "b", "c") in ("near:2", "near:3"), "one block crosses the link between the switches, not two"
    me.stored("d", 40, 0)
    assert me.submit("d", "b", "c") == "near:0", "40 bytes are more than the two of the other switch"
    me.stored("e", 10, 0, 2)
    me.stored("f", 10, 3)
    me.stored("g", 9, 1)
    assert me.submit("e", "f", "g") == "near:2", "a copy behind each switch speaks for neither"
    me.stored("h", 10, 7)
    me.stored("i", 9, 1)
    assert me.submit("h", "i") == "near:1", "a node whose place is not known has no switch"


def test_places_without_a_common_switch_change_nothing() -> None:
    me = Submitting()
    me.locality.cluster_grew({node: (f"s{node}",) for node in range(4)})
    me.stored("a", 10, 2)
    me.stored("b", 15, 3)
    assert me.submit("a", "b") == "near:3"
    me.stored("c", 10, 2)
    me.stored("d", 6, 2, 0)
    me.stored("e", 15, 3)
    assert me.submit("c", "d", "e") == "near:2", "sixteen bytes are more than fifteen"
