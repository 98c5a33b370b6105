"""Ray Data, lent from Ray's wheel: datasets consumed, split, described, and what is said of errors."""

from __future__ import annotations

from typing import Any

import pytest

np = pytest.importorskip("numpy")
for needed in ("pandas", "pyarrow", "psutil"):
    pytest.importorskip(needed)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_rows_and_batches_are_iterated(ray: Any) -> None:
    dataset = ray.data.range(100, override_num_blocks=5)
    assert [row["id"] for row in dataset.iter_rows()] == list(range(100))
    sizes = [len(batch["id"]) for batch in dataset.iter_batches(batch_size=32)]
    assert sizes == [32, 32, 32, 4]
    assert [len(b["id"]) for b in dataset.iter_batches(batch_size=32, drop_last=True, prefetch_batches=2)] == [32] * 3
    shuffled = np.concatenate(
        [b["id"] for b in dataset.iter_batches(batch_size=10, local_shuffle_buffer_size=50, local_shuffle_seed=1)]
    )
    assert shuffled.tolist() != list(range(100)) and sorted(shuffled) == list(range(100))
    assert [batch.num_rows for batch in dataset.iter_batches(batch_size=50, batch_format="pyarrow")] == [50, 50]
    assert dataset.take(3) == [{"id": 0}, {"id": 1}, {"id": 2}]


def test_batches_of_torch(ray: Any) -> None:
    torch = pytest.importorskip("torch")
    dataset = ray.data.range_tensor(20, shape=(3,))
    batches = list(dataset.iter_torch_batches(batch_size=8, dtypes=torch.float32))
    assert [tuple(batch["data"].shape) for batch in batches] == [(8, 3), (8, 3), (4, 3)]
    assert torch.equal(torch.cat([batch["data"] for batch in batches])[:, 0], torch.arange(20.0))

    class Squares(torch.utils.data.Dataset):  # type: ignore[name-defined,misc]
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            return index * index

    assert [row["item"] for row in ray.data.from_torch(Squares()).take_all()] == [n * n for n in range(10)]


def test_splits(ray: Any) -> None:
    dataset = ray.data.range(100, override_num_blocks=10)
    train, test = dataset.train_test_split(test_size=0.25)
    assert (train.count(), test.count()) == (75, 25)
    assert [part.count() for part in dataset.split(4, equal=True)] == [25] * 4
    assert [part.count() for part in dataset.split_at_indices([10, 30])] == [10, 20, 70]
    assert [part.count() for part in dataset.split_proportionately([0.2, 0.5])] == [20, 50, 30]
    hashed = [part.count() for part in dataset.train_test_split(test_size=0.2, shuffle=True, seed=1)]
    assert hashed == [80, 20]


def test_actors_consume_a_split_stream(ray: Any) -> None:
    @ray.remote
    class Consumer:
        def consume(self, part: Any, epochs: int) -> list[list[int]]:
            return [[int(n) for batch in part.iter_batches(batch_size=7) for n in batch["id"]] for _ in range(epochs)]

    dataset = ray.data.range(1000, override_num_blocks=20).map_batches(lambda batch: {"id": batch["id"] + 1})
    parts = dataset.streaming_split(2, equal=True)
    consumers = [Consumer.remote() for _ in parts]
    found = ray.get([one.consume.remote(part, 2) for one, part in zip(consumers, parts, strict=True)])
    for epoch in range(2):
        assert sorted(found[0][epoch] + found[1][epoch]) == list(range(1, 1001))
        assert len(found[0][epoch]) == 500


def test_a_dataset_is_an_argument_of_a_task(ray: Any) -> None:
    @ray.remote
    def count(dataset: Any) -> int:
        return dataset.map(lambda row: row).count()

    assert ray.get(count.remote(ray.data.range(50))) == 50
    kept = ray.data.range(50).materialize()
    assert ray.get(count.remote(kept)) == 50
    again = ray.data.Dataset.deserialize_lineage(ray.data.range(10).map(lambda row: row).serialize_lineage())
    assert again.count() == 10


def test_what_is_known_of_a_dataset(ray: Any) -> None:
    lazy = ray.data.range(1000, override_num_blocks=4).map_batches(lambda batch: batch)
    kept = lazy.materialize()
    assert (kept.num_blocks(), kept.count(), kept.size_bytes()) == (4, 1000, 8000)
    assert kept.schema().names == ["id"] and str(kept.schema().types[0]) == "int64"
    stats = kept.stats()
    assert "ReadRange->MapBatches" in stats and "4 tasks executed, 4 blocks produced" in stats
    assert "Output rows" in stats and "1000 total" in stats
    assert sorted(n for ref in kept.to_numpy_refs() for n in ray.get(ref)["id"]) == list(range(1000))
    assert sum(len(ray.get(ref)) for ref in kept.to_pandas_refs()) == 1000
    assert kept.to_pandas().equals(lazy.to_pandas())


def test_the_error_of_a_function_reaches_the_program(ray: Any) -> None:
    def bad(row: dict[str, int]) -> dict[str, int]:
        if row["id"] == 13:
            raise ValueError("thirteen is no good")
        return row

    with pytest.raises(ray.exceptions.UserCodeException, match="thirteen is no good") as caught:
        ray.data.range(20).map(bad).materialize()
    text = str(caught.value)
    assert isinstance(caught.value, ray.exceptions.RayTaskError)
    assert "ray::ReadRange->Map(bad)()" in text.replace("\x1b[36m", "").replace("\x1b[39m", "")
    assert "in bad" in text and "ray/data/_internal" not in text

    class Bad:
        def __init__(self) -> None:
            raise KeyError("not made")

        def __call__(self, batch: Any) -> Any:
            return batch

    with pytest.raises(Exception, match="not made"):
        ray.data.range(20).map_batches(Bad, concurrency=1).materialize()
    assert ray.data.range(20).count() == 20


def test_some_blocks_may_fail(ray: Any) -> None:
    def bad(batch: dict[str, Any]) -> dict[str, Any]:
        if 13 in batch["id"]:
            raise ValueError("thirteen is no good")
        return batch

    context = ray.data.DataContext.get_current()
    given, context.max_errored_blocks = context.max_errored_blocks, 1
    try:
        dataset = ray.data.range(20, override_num_blocks=10).map_batches(bad)
        assert sorted(row["id"] for row in dataset.take_all()) == [n for n in range(20) if n not in (12, 13)]
    finally:
        context.max_errored_blocks = given


def test_actors_try_again_after_errors_that_are_named(ray: Any, tmp_path: Any) -> None:
    class Unlucky:
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            if not (tmp_path / "tried").exists():
                (tmp_path / "tried").touch()
                raise ConnectionError("the first time")
            return batch

    context = ray.data.DataContext.get_current()
    given, context.actor_task_retry_on_errors = context.actor_task_retry_on_errors, [ConnectionError]
    try:
        assert ray.data.range(20).map_batches(Unlucky, concurrency=1).sum("id") == 190
    finally:
        context.actor_task_retry_on_errors = given


def test_a_slow_consumer_holds_the_producer_back(ray: Any, tmp_path: Any) -> None:
    """Blocks of 8 MB, a limit of 64 MB: what is made runs ahead of what was taken by that much, not by all."""
    made = tmp_path / "made"
    made.mkdir()

    def produce(batch: dict[str, Any]) -> dict[str, Any]:
        (made / str(int(batch["id"][0]))).touch()
        return {"id": batch["id"], "data": np.zeros((1, 1 << 20), np.float64)}

    context = ray.data.DataContext.get_current()
    given = context.execution_options.resource_limits
    context.execution_options.resource_limits = ray.data.ExecutionResources.for_limits(object_store_memory=64 << 20)
    try:
        import time

        ahead = []
        blocks = ray.data.range(64, override_num_blocks=64).map_batches(produce, batch_size=1)
        for taken, batch in enumerate(blocks.iter_batches(batch_size=1, prefetch_batches=1), 1):
            if taken in (8, 16):
                time.sleep(2)
                ahead.append(len(list(made.iterdir())) - taken)
            assert batch["data"].shape == (1, 1 << 20)
        assert taken == 64
    finally:
        context.execution_options.resource_limits = given
    assert max(ahead) < 24, ahead
