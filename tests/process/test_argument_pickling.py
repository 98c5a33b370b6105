"""A large argument is pickled once: the object that it becomes is made of what was pickled to learn its size."""

from __future__ import annotations

import pytest
from engine import hpcray_only, ray

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 1}
SMALL, LARGE = 10, 3000


class Counted:
    """An element that counts how often it is pickled."""

    times = 0

    def __init__(self, index: int) -> None:
        self.index, self.text = index, f"{index:0100}"

    def __reduce__(self):
        Counted.times += 1
        return _made, (self.index, self.text)


def _made(index: int, text: str) -> int:
    return index


@ray.remote
def total(*args, **kwargs):
    values = [*args, *kwargs.values()]
    return sum(sum(value.values() if isinstance(value, dict) else value) for value in values if type(value) is not str)


@ray.remote
def is_same(first, second):
    return first is second


def elements(count: int) -> list[Counted]:
    return [Counted(index) for index in range(count)]


def pickled(*args, **kwargs) -> tuple[int, int]:
    """The times that an element was pickled, and what a task makes of the arguments."""
    Counted.times = 0
    found = total.remote(*args, **kwargs)
    return Counted.times, ray.get(found)


def test_a_large_list_is_pickled_once():
    assert pickled(elements(LARGE)) == (LARGE, sum(range(LARGE)))


def test_a_large_dict_is_pickled_once():
    assert pickled(dict(enumerate(elements(LARGE)))) == (LARGE, sum(range(LARGE)))


def test_a_large_list_beside_small_arguments_is_pickled_once():
    assert pickled("text", elements(LARGE), other="x" * 100) == (LARGE, sum(range(LARGE)))


def test_a_large_keyword_argument_is_pickled_once():
    assert pickled("text", ünïcode=elements(LARGE)) == (LARGE, sum(range(LARGE)))


def test_two_large_lists_are_pickled_once_each():
    assert pickled(elements(LARGE), b=elements(LARGE)) == (2 * LARGE, 2 * sum(range(LARGE)))


def test_a_list_of_few_large_elements_is_pickled_once():
    few = elements(SMALL)
    for one in few:
        one.text = "x" * 100_000
    assert pickled(few, "text") == (SMALL, sum(range(SMALL)))


def test_a_small_list_is_pickled_once():
    assert pickled(elements(SMALL)) == (SMALL, sum(range(SMALL)))


def test_a_large_argument_with_refs_inside_keeps_them():
    refs = [ray.put(index) for index in range(3)]
    value = {"refs": refs, "pad": elements(LARGE)}

    @ray.remote
    def read(given):
        return ray.get(given["refs"])

    found = read.remote(value)
    del refs, value
    assert ray.get(found) == [0, 1, 2]


def test_two_small_arguments_that_are_one_object_stay_one():
    small = [1, 2]
    assert ray.get(is_same.remote(small, small))
