"""Which class a task is sorted into: by the bytes of its arguments, not by what all tasks share."""

from __future__ import annotations

from hpcray.base.ids import make_proc
from hpcray.core.owner.entries import INLINE, STORED, Entry
from hpcray.core.owner.leases import LeaseClient
from hpcray.core.owner.locality import Locality
from hpcray.core.owner.tasks import Function, Task
from hpcray.wire.messages import Message, Shape

HOME = 1
PLAIN = Shape((("CPU", 10_000),))


class Submitting:
    """Objects by name, and where their tasks go."""

    def __init__(self, nodes: int = 4) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.sent: list[Message] = []
        self.client = LeaseClient(make_proc(HOME, 5), lambda _, msg: self.sent.append(msg), lambda *_: None, 0.1)
        self.locality = Locality(self.client, self.entries, HOME, nodes)
        self.function = Function(b"f" * 16, "f", b"")
        self.count = 0

    def stored(self, name: str, size: int, *nodes: int) -> None:
        entry = self.entries[name.encode()] = Entry()
        entry.state, entry.size, entry.nodes = STORED, size, list(nodes)

    def submit(self, *names: str, shape: Shape = PLAIN) -> str:
        self.count += 1
        slots = [name.encode() for name in names]
        task = Task(self.count.to_bytes(13, "big"), self.function, "", b"", 1, None, slots or None, 0)
        klass = self.locality.klass(task, self.client.klass(shape))
        self.client.submit(task, klass)
        return klass.shape.strategy


def test_most_bytes_decide() -> None:
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


def test_what_all_tasks_share_keeps_none_of_them() -> None:
    me = Submitting()
    me.stored("model", 1000, 2)
    assert [me.submit("model") for _ in range(4)] == ["near:2", "", "", ""]
    for node in range(4):
        me.stored(f"block {node}", 10, node)
    assert [me.submit("model", f"block {node}") for node in (3, 0, 2)] == ["near:3", "near:0", "near:2"]


def test_nothing_is_near_where_it_makes_no_difference() -> None:
    me = Submitting()
    me.stored("a", 10, 2)
    small = me.entries[b"small"] = Entry()
    small.state = INLINE
    assert me.submit("small") == "" and me.submit("nobody knows") == ""
    assert me.submit("a", shape=Shape(PLAIN.resources, "SPREAD")) == "SPREAD"
    alone = Submitting(nodes=1)
    alone.stored("a", 10, 2)
    assert alone.submit("a") == ""
