"""Modules of Ray's own code on its public API, lent from its wheel: `util.iter`, `experimental.shuffle`, helpers."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def of(job: Any) -> Any:
    """`ray.util.iter`, of the wheel."""
    from ray.util import iter as lent

    assert "/hpcray/util/" not in lent.__file__
    return lent


def test_a_shuffle_moves_items_between_partitions(job: Any) -> None:
    from ray.experimental.shuffle import simple_shuffle

    found = simple_shuffle(
        input_reader=lambda number: [number] * 2,
        input_num_partitions=3,
        output_num_partitions=2,
        output_writer=lambda number, refs: sum(job.get(refs)),
    )
    assert found == [3, 3]


def test_helpers_are_those_of_the_wheel(job: Any) -> None:
    from ray._common.retry import call_with_retry
    from ray._private.collections_utils import split
    from ray._private.dict import flatten_dict
    from ray._private.inspect_util import is_class_method
    from ray._private.label_utils import parse_node_labels_string
    from ray._private.path_utils import is_path

    assert is_path("/a") and not is_path("s3://a")
    assert flatten_dict({"a": {"b": 1}}) == {"a/b": 1}
    assert parse_node_labels_string("a=b") == {"a": "b"}
    assert call_with_retry(lambda: 3, "count", match=["never"], max_attempts=2) == 3
    assert is_class_method(int.from_bytes) and list(split([1, 2, 3], 2))


def test_operators_run_in_the_order_in_which_they_are_chained(of, job):
    it = of.from_range(12, 3).for_each(lambda x: x * 2).filter(lambda x: x % 4 == 0).batch(2).flatten()
    assert repr(it) == "ParallelIterator[from_range[12, shards=3].for_each().filter().batch(2).flatten()]"
    assert list(it.gather_sync()) == [0, 8, 16, 4, 12, 20]
    assert [list(shard) for shard in of.from_range(7, 3).shards()] == [[0, 1], [2, 3], [4, 5, 6]]


def test_shards_of_different_length_are_read_to_their_ends(of, job):
    it = of.from_iterators([[1], [2, 3, 4], lambda: iter([5, 6])])
    assert list(it.batch_across_shards()) == [[1, 2, 5], [3, 6], [4]]
    assert sorted(of.from_iterators([[1], range(40)]).gather_async(batch_ms=5, num_async=3)) == sorted([1, *range(40)])


@pytest.mark.parametrize("batch_ms", [0, 5])
def test_repartition_deals_the_items_of_each_shard(of, job, batch_ms):
    it = of.from_range(10, 2).repartition(3, batch_ms).for_each(lambda x: -x)
    assert [sorted(shard) for shard in it.shards()] == [[-8, -5, -3, 0], [-9, -6, -4, -1], [-7, -2]]


def test_an_error_of_an_operator_is_raised_at_its_turn(of, job):
    it = of.from_range(3, 1).for_each(lambda x: 1 // (x - 1)).gather_sync()
    assert next(it) == -1
    with pytest.raises(ZeroDivisionError):
        next(it)


def test_repeated_items_come_again(of, job):
    assert of.from_items([1, 2, 3], num_shards=1, repeat=True).take(7) == [1, 2, 3, 1, 2, 3, 1]
    assert of.from_iterators([lambda: iter("ab")], repeat=True).take(3) == ["a", "b", "a"]


def test_a_local_iterator_travels_before_it_is_read(of, job):
    it = of.from_range(4, 2).gather_async().for_each(lambda x: x + 1)
    assert sorted(job.get(job.remote(lambda items: list(items)).remote(it))) == [1, 2, 3, 4]


def test_a_union_takes_items_by_weight(of, job):
    def one(items):
        return of.from_items(items, 1).gather_sync()

    assert list(one([1, 2]).union(one("abc"), deterministic=True)) == [1, "a", 2, "b", "c"]
    assert list(one([1, 2, 3]).union(one("ab"), round_robin_weights=[2, 1])) == [1, 2, "a", 3, "b"]
    assert sorted(one([1, 2, 3]).union(one([4]), round_robin_weights=[1, "*"])) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="weights"):
        one([1]).union(one([2]), round_robin_weights=[1])


def test_copies_of_an_iterator_have_all_items_each(of, job):
    odd, even = of.from_range(6, 2).gather_sync().duplicate(2)
    both = odd.filter(lambda x: x % 2).union(even.filter(lambda x: x % 2 == 0))
    assert sorted(both) == list(range(6))


def test_metrics_are_shared_along_a_chain(of, job):
    def count(x):
        of.LocalIterator.get_metrics().counters["seen"] += 1
        return x

    it = of.from_range(5, 1).gather_sync().for_each(count)
    counted = it.for_each(lambda x: of.LocalIterator.get_metrics().counters["seen"])
    assert list(counted) == [1, 2, 3, 4, 5]
    sources = list(of.from_range(4, 2).gather_async().zip_with_source_actor())
    assert sorted(x for _, x in sources) == [0, 1, 2, 3]
    assert len({actor for actor, _ in sources}) == 2


def test_for_each_with_tasks_calls_as_many_at_a_time_as_it_may(of, job):
    it = of.from_range(20, 2).for_each(lambda x: x * x, max_concurrency=3, resources={"num_cpus": 0.1})
    assert sorted(it.gather_async()) == sorted(x * x for x in range(20))


def test_what_cannot_be_read_is_refused(of, job):
    it = of.from_range(4)
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
