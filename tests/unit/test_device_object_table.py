"""Which tensors a process keeps, and for which objects."""

from __future__ import annotations

from hpcray.core.core_worker.device_objects import DeviceObjectTable


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
