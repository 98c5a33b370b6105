"""Which tensors a process keeps, and for which objects."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcray.tensors.device_object_table import DeviceObjectTable


def test_a_tensor_is_held_while_an_object_has_it() -> None:
    table, tensor, other = DeviceObjectTable(), object(), object()
    table.add(b"1", [tensor, tensor, other])
    table.add(b"2", [tensor])
    table.note_export(b"1")
    table.note_export(b"3")
    table.check_invariants()
    assert table.find(b"2") == [tensor] and table.exported == {b"1"}
    table.remove(b"1")
    table.check_invariants()
    assert table.holds(tensor) and not table.holds(other) and not table.exported
    table.remove(b"2")
    table.remove(b"2")
    assert not table.holds(tensor) and table.find(b"2") is None
    table.check_invariants()


class Tensor:
    """Stands for one."""


def full(count: int, each: int = 10) -> DeviceObjectTable:
    """A table with objects of `each` bytes on one device, named 0, 1, ... from the one used least recently on."""
    table = DeviceObjectTable(moves=True)
    for number in range(count):
        table.add(b"%d" % number, [Tensor()], sizes={"cuda:0": each})
    return table


def test_the_least_recently_used_objects_are_to_move_first() -> None:
    table = full(4)
    assert not table.is_over(40) and table.surplus(40) == []
    assert table.is_over(30) and table.surplus(30) == [b"0", b"1", b"2", b"3"]
    table.find(b"0")
    assert table.surplus(30, kept=b"2") == [b"1", b"3", b"0"]
    table.add(b"other", [Tensor()], sizes={"cuda:1": 10})
    assert b"other" not in table.surplus(30), "its device has room"
    assert table.is_over(40, {"cuda:0": 1}) and not table.is_over(40, {"cuda:1": 30})
    assert table.surplus(40, {"cuda:2": 50}) == [] and table.is_over(40, {"cuda:2": 50})


def test_tensors_that_others_have_mapped_and_fixed_ones_stay() -> None:
    table = full(3)
    table.add(b"fixed", [Tensor()], sizes={"cuda:0": 10}, fixed=True)
    assert table.note_reader(b"0", b"reader") and table.note_reader(b"0", b"reader")
    assert table.surplus(0) == [b"1", b"2"] and not table.may_move(b"0") and not table.may_move(b"fixed")
    table.end_reader(b"0", b"reader")
    assert not table.may_move(b"0")
    table.end_reader(b"0", b"reader")
    table.end_reader(b"0", b"reader")
    assert table.may_move(b"0")
    table.note_reader(b"1", b"reader")
    table.process_died(b"reader")
    assert table.may_move(b"1") and not table.note_reader(b"gone", b"reader")


def test_what_has_moved_counts_for_no_device_and_comes_back_as_other_tensors() -> None:
    table = full(2)
    before = table.find(b"0")
    assert before is not None
    table.move_out(b"0")
    table.check_invariants()
    assert table.find(b"0") is None and table.has_moved_out(b"0") and not table.holds(before[0])
    assert table.totals() == {"cuda:0": (1, 10)} and table.sizes(b"0") == {"cuda:0": 10}
    assert not table.note_reader(b"0", b"reader"), "it knows where they were"
    back, again = [Tensor()], [Tensor()]
    assert table.move_back(b"0", back) is back and table.move_back(b"0", again) is back
    assert table.totals()["cuda:0"] == (2, 20) and table.holds(back[0]) and not table.holds(again[0])
    assert not table.note_reader(b"0", b"reader"), "they are elsewhere now"
    table.check_invariants()
    table.move_out(b"0")
    table.remove(b"0")
    assert not table.has_moved_out(b"0") and table.move_back(b"0", back) is back and not table.holds(back[0])
    table.check_invariants()


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "find", "map", "unmap", "room", "back", "remove", "die"]), st.integers(0, 5)),
        max_size=60,
    )
)
def test_whatever_comes_only_what_nobody_has_mapped_moves(steps: list[tuple[str, int]]) -> None:
    table = DeviceObjectTable(moves=True)
    mapped: dict[bytes, int] = {}
    for number, (step, which) in enumerate(steps):
        oid = b"%d" % which
        if step == "add" and not table.sizes(oid):
            table.add(oid, [Tensor()], sizes={"cuda:0": 10 + which})
        elif step == "find":
            table.find(oid)
        elif step == "map" and table.note_reader(oid, b"r"):
            mapped[oid] = mapped.get(oid, 0) + 1
        elif step == "unmap" and mapped.get(oid):
            table.end_reader(oid, b"r")
            mapped[oid] -= 1
        elif step == "room":
            for each in table.surplus(20):
                if table.is_over(20):
                    assert not mapped.get(each)
                    table.move_out(each)
            assert not table.is_over(20) or not table.surplus(20), number
        elif step == "back" and table.has_moved_out(oid):
            table.move_back(oid, [Tensor()])
        elif step == "remove":
            table.remove(oid)
            mapped.pop(oid, None)
        elif step == "die":
            table.process_died(b"r")
            mapped.clear()
        table.check_invariants()
