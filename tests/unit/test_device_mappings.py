"""Which way tensors on a device take to a reader, and which memory of others it keeps mapped."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcray.tensors.device_mappings import (
    HOST,
    IDLE_LIMIT,
    IDLE_TIME,
    MAPPED,
    SAME_PROCESS,
    DeviceAllocation,
    DeviceMappings,
    Place,
    choose_way,
)

MAKER = Place(b"maker", "kernel 1", {"gpu-0"})
FIRST = DeviceAllocation(b"maker", 1, "gpu-0")


@pytest.mark.parametrize(
    "reader, way",
    [
        (Place(b"maker", "kernel 1", {"gpu-0"}), SAME_PROCESS),
        (Place(b"maker", "kernel 1", set()), SAME_PROCESS),
        (Place(b"other", "kernel 1", {"gpu-0"}), MAPPED),
        (Place(b"other", "kernel 1", {"gpu-0", "gpu-1"}), MAPPED),
        (Place(b"other", "kernel 1", {"gpu-1"}), HOST),
        (Place(b"other", "kernel 1", set()), HOST),
        (Place(b"other", "kernel 2", {"gpu-0"}), HOST),
    ],
)
def test_the_way_follows_from_where_the_tensors_and_the_reader_are(reader: Place, way: str) -> None:
    assert choose_way(MAKER, reader) == way
    assert choose_way(MAKER, reader, private=True) == HOST


def test_hosts_that_are_not_known_are_not_the_same() -> None:
    maker, reader = (Place(process, "", {"gpu-0"}) for process in (b"maker", b"other"))
    assert choose_way(maker, reader) == HOST


def test_tensors_of_the_host_and_tensors_on_a_device_that_the_reader_lacks_are_copied() -> None:
    reader = Place(b"other", "kernel 1", {"gpu-0"})
    assert choose_way(Place(b"maker", "kernel 1", set()), reader) == HOST
    assert choose_way(Place(b"maker", "kernel 1", {"gpu-0", "gpu-1"}), reader) == HOST


def test_a_mapping_is_kept_while_it_is_used_and_for_a_while_after() -> None:
    mappings = DeviceMappings()
    assert mappings.use(FIRST) is None
    mappings.opened(FIRST, 4096, 0.0)
    assert [mappings.use(FIRST), mappings.use(FIRST)] == [4096, 4096]
    mappings.unuse(FIRST, 1.0)
    assert mappings.expire(1e6) == []
    mappings.unuse(FIRST, 2.0)
    assert mappings.expire(2.0 + IDLE_TIME - 0.1) == [] and len(mappings) == 1
    assert mappings.expire(2.0 + IDLE_TIME) == [(FIRST, 4096)]
    assert mappings.use(FIRST) is None and len(mappings) == 0


def test_an_allocation_is_not_mapped_twice_nor_used_less_than_never() -> None:
    mappings = DeviceMappings()
    mappings.opened(FIRST, 4096, 0.0)
    with pytest.raises(ValueError, match="is mapped already"):
        mappings.opened(FIRST, 8192, 0.0)
    with pytest.raises(AssertionError):
        mappings.unuse(FIRST, 0.0)


def test_of_too_many_idle_mappings_the_oldest_are_closed() -> None:
    mappings = DeviceMappings()
    for number in range(IDLE_LIMIT + 3):
        mappings.opened(DeviceAllocation(b"maker", number, "gpu-0"), number, number / 1000)
    assert [key.ident for key, _ in mappings.expire(1.0)] == [0, 1, 2]
    mappings.use(DeviceAllocation(b"maker", 3, "gpu-0"))
    assert len(mappings.clear()) == IDLE_LIMIT - 1, "the one in use ends with the process"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["use", "unuse", "expire", "wait"]), st.integers(0, 5), st.sampled_from([0.125, 11.0])
        ),
        max_size=80,
    )
)
def test_whatever_comes_a_mapping_with_users_stays_and_an_idle_one_ends(steps: list[tuple[str, int, float]]) -> None:
    mappings = DeviceMappings()
    users: dict[Any, int] = {}
    pointers = iter(range(1, 1000))
    opened: dict[Any, int] = {}
    now = 0.0
    for step, which, seconds in steps:
        key = DeviceAllocation(b"maker", which, "gpu-0")
        if step == "use":
            found = mappings.use(key)
            assert (found is not None) == (key in opened)
            if found is None:
                opened[key] = next(pointers)
                mappings.opened(key, opened[key], now)
                found = mappings.use(key)
            assert found == opened[key]
            users[key] = users.get(key, 0) + 1
        elif step == "unuse" and users.get(key):
            mappings.unuse(key, now)
            users[key] -= 1
        elif step == "expire":
            for closed, pointer in mappings.expire(now):
                assert not users.get(closed) and opened.pop(closed) == pointer
        else:
            now += seconds
        mappings.check_invariants()
    for closed, _ in mappings.expire(now + IDLE_TIME):
        del opened[closed]
    assert set(opened) == {key for key, count in users.items() if count}
