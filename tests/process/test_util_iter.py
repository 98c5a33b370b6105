"""`util.iter`: parallel and local iterators."""

from __future__ import annotations

import importlib

import pytest
from engine import NAME, ray

module = importlib.import_module(f"{NAME}.util.iter")
LocalIterator, from_items, from_iterators, from_range = (
    module.LocalIterator,
    module.from_items,
    module.from_iterators,
    module.from_range,
)

pytestmark = pytest.mark.usefixtures("session")


def test_operators_run_in_the_order_in_which_they_are_chained():
    it = from_range(12, 3).for_each(lambda x: x * 2).filter(lambda x: x % 4 == 0).batch(2).flatten()
    assert repr(it) == "ParallelIterator[from_range[12, shards=3].for_each().filter().batch(2).flatten()]"
    assert list(it.gather_sync()) == [0, 8, 16, 4, 12, 20]
    assert [list(shard) for shard in from_range(7, 3).shards()] == [[0, 1], [2, 3], [4, 5, 6]]


def test_shards_of_different_length_are_read_to_their_ends():
    it = from_iterators([[1], [2, 3, 4], lambda: iter([5, 6])])
    assert list(it.batch_across_shards()) == [[1, 2, 5], [3, 6], [4]]
    assert sorted(from_iterators([[1], range(40)]).gather_async(batch_ms=5, num_async=3)) == sorted([1, *range(40)])


@pytest.mark.parametrize("batch_ms", [0, 5])
def test_repartition_deals_the_items_of_each_shard(batch_ms):
    it = from_range(10, 2).repartition(3, batch_ms).for_each(lambda x: -x)
    assert [sorted(shard) for shard in it.shards()] == [[-8, -5, -3, 0], [-9, -6, -4, -1], [-7, -2]]


def test_an_error_of_an_operator_is_raised_at_its_turn():
    it = from_range(3, 1).for_each(lambda x: 1 // (x - 1)).gather_sync()
    assert next(it) == -1
    with pytest.raises(ZeroDivisionError):
        next(it)


def test_repeated_items_come_again():
    assert from_items([1, 2, 3], num_shards=1, repeat=True).take(7) == [1, 2, 3, 1, 2, 3, 1]
    assert from_iterators([lambda: iter("ab")], repeat=True).take(3) == ["a", "b", "a"]


def test_a_local_iterator_travels_before_it_is_read():
    it = from_range(4, 2).gather_async().for_each(lambda x: x + 1)
    assert sorted(ray.get(ray.remote(lambda items: list(items)).remote(it))) == [1, 2, 3, 4]


def test_a_union_takes_items_by_weight():
    def of(items):
        return from_items(items, 1).gather_sync()

    assert list(of([1, 2]).union(of("abc"), deterministic=True)) == [1, "a", 2, "b", "c"]
    assert list(of([1, 2, 3]).union(of("ab"), round_robin_weights=[2, 1])) == [1, 2, "a", 3, "b"]
    assert sorted(of([1, 2, 3]).union(of([4]), round_robin_weights=[1, "*"])) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="weights"):
        of([1]).union(of([2]), round_robin_weights=[1])


def test_copies_of_an_iterator_have_all_items_each():
    odd, even = from_range(6, 2).gather_sync().duplicate(2)
    both = odd.filter(lambda x: x % 2).union(even.filter(lambda x: x % 2 == 0))
    assert sorted(both) == list(range(6))


def test_metrics_are_shared_along_a_chain():
    def count(x):
        LocalIterator.get_metrics().counters["seen"] += 1
        return x

    it = from_range(5, 1).gather_sync().for_each(count)
    counted = it.for_each(lambda x: LocalIterator.get_metrics().counters["seen"])
    assert list(counted) == [1, 2, 3, 4, 5]
    sources = list(from_range(4, 2).gather_async().zip_with_source_actor())
    assert sorted(x for _, x in sources) == [0, 1, 2, 3]
    assert len({actor for actor, _ in sources}) == 2


def test_for_each_with_tasks_calls_as_many_at_a_time_as_it_may():
    it = from_range(20, 2).for_each(lambda x: x * x, max_concurrency=3, resources={"num_cpus": 0.1})
    assert sorted(it.gather_async()) == sorted(x * x for x in range(20))


def test_what_cannot_be_read_is_refused():
    it = from_range(4)
    with pytest.raises(TypeError, match="gather_sync"):
        iter(it)
    with pytest.raises(ValueError, match="out of range"):
        it.get_shard(2)
    with pytest.raises(ValueError, match="positive"):
        it.gather_async(num_async=0)
    with pytest.raises(TypeError, match="ParallelIterator"):
        it.union([1])
    with pytest.raises(ValueError, match="one shard"):
        it.select_shards([])
