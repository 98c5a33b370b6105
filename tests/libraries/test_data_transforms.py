"""Ray Data, lent from Ray's wheel: programs of its user guides that transform data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
np = pytest.importorskip("numpy")
pd = pytest.importorskip("pandas")
pa = pytest.importorskip("pyarrow")


@pytest.fixture(autouse=True)
def in_order(ray: Any) -> Iterator[None]:
    """Blocks come in the order of their numbers, not of their ends."""
    options = ray.data.DataContext.get_current().execution_options
    options.preserve_order = True
    yield
    options.preserve_order = False


def column(dataset: Any, name: str) -> list[Any]:
    """The values of one column, in the dataset's order."""
    return [row[name] for row in dataset.take_all()]


def test_made_from_python_pandas_numpy_and_arrow(ray: Any) -> None:
    frame = pd.DataFrame({"a": [1, 2, 3], "b": ["x", "y", "z"]})
    rows = frame.to_dict("records")
    assert ray.data.from_items(rows).take_all() == rows
    assert ray.data.from_pandas(frame).take_all() == rows
    assert ray.data.from_arrow(pa.Table.from_pandas(frame)).take_all() == rows
    assert [row["data"].tolist() for row in ray.data.from_numpy(np.arange(6).reshape(3, 2)).take_all()] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    assert ray.data.from_pandas_refs([ray.put(frame), ray.put(frame)]).count() == 6
    dataset = ray.data.range(100, override_num_blocks=4)
    assert (dataset.count(), dataset.sum("id"), dataset.schema().names) == (100, 4950, ["id"])
    tensors = ray.data.range_tensor(4, shape=(2, 2))
    assert tensors.take_batch(2)["data"].shape == (2, 2, 2)


def test_rows_are_mapped_filtered_and_multiplied(ray: Any) -> None:
    dataset = ray.data.range(20)
    assert column(dataset.map(lambda row: {"id": row["id"] * 2}), "id") == list(range(0, 40, 2))
    assert column(dataset.filter(lambda row: row["id"] % 5 == 0), "id") == [0, 5, 10, 15]
    assert column(dataset.flat_map(lambda row: [row] * (row["id"] % 2)), "id") == list(range(1, 20, 2))
    changed = dataset.add_column("square", lambda batch: batch["id"] ** 2).rename_columns({"id": "root"})
    assert changed.limit(4).take_all() == [{"root": n, "square": n * n} for n in range(4)]
    assert changed.select_columns(["square"]).schema().names == ["square"]
    assert changed.drop_columns(["square"]).schema().names == ["root"]


@pytest.mark.parametrize("batch_format", ["numpy", "pandas", "pyarrow"])
def test_batches_come_in_the_format_asked_for(ray: Any, batch_format: str) -> None:
    def double(batch: Any) -> Any:
        if batch_format == "pyarrow":
            return pa.table({"id": pa.compute.multiply(batch["id"], 2), "rows": [batch.num_rows] * batch.num_rows})
        assert type(batch).__name__ == {"numpy": "dict", "pandas": "DataFrame"}[batch_format]
        batch = batch.copy()
        batch["rows"] = np.full(len(batch["id"]), len(batch["id"]))
        batch["id"] = batch["id"] * 2
        return batch

    dataset = ray.data.range(100, override_num_blocks=1)
    mapped = dataset.map_batches(double, batch_format=batch_format, batch_size=40, num_cpus=0.5)
    rows = mapped.take_all()
    assert [row["id"] for row in rows] == list(range(0, 200, 2))
    assert sorted({row["rows"] for row in rows}) == [20, 40]


def test_a_class_is_made_once_for_each_actor(ray: Any) -> None:
    class Adder:
        def __init__(self, amount: int, *, factor: int) -> None:
            import os

            self.amount, self.factor, self.pid = amount, factor, os.getpid()

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            batch["id"] = batch["id"] * self.factor + self.amount
            batch["pid"] = np.full(len(batch["id"]), self.pid)
            return batch

    dataset = ray.data.range(400, override_num_blocks=8).map_batches(
        Adder, fn_constructor_args=(7,), fn_constructor_kwargs={"factor": 3}, concurrency=2, batch_size=10
    )
    rows = dataset.take_all()
    assert sorted(row["id"] for row in rows) == [3 * n + 7 for n in range(400)]
    assert 1 <= len({row["pid"] for row in rows}) <= 2
    growing = ray.data.range(50).map_batches(
        Adder,
        fn_constructor_args=(0,),
        fn_constructor_kwargs={"factor": 1},
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=2),
    )
    assert growing.sum("id") == 1225


def test_generators_and_coroutines_as_functions(ray: Any) -> None:
    def twice(batch: dict[str, Any]) -> Any:
        yield {"id": batch["id"]}
        yield {"id": batch["id"] + 1000}

    assert sorted(column(ray.data.range(10).map_batches(twice), "id")) == [*range(10), *range(1000, 1010)]

    class Later:
        async def __call__(self, batch: dict[str, Any]) -> Any:
            import asyncio

            await asyncio.sleep(0.01)
            yield {"id": -batch["id"]}

    found = column(ray.data.range(10).map_batches(Later, concurrency=1, batch_size=2), "id")
    assert sorted(found) == list(range(-9, 1))


def test_blocks_are_repartitioned_and_shuffled(ray: Any) -> None:
    dataset = ray.data.range(1000, override_num_blocks=10)
    assert dataset.repartition(3).materialize().num_blocks() == 3
    assert sorted(column(dataset.repartition(7, shuffle=True), "id")) == list(range(1000))
    one, again = (column(dataset.random_shuffle(seed=5), "id") for _ in range(2))
    assert sorted(one) == list(range(1000)) and one == again != list(range(1000))
    assert sorted(column(dataset.randomize_block_order(seed=1), "id")) == list(range(1000))
    assert 0 < dataset.random_sample(0.2, seed=3).count() < 500


@pytest.mark.parametrize("descending", [False, True])
def test_sort(ray: Any, descending: bool) -> None:
    keys = np.random.default_rng(0).permutation(5000)
    dataset = ray.data.from_items([{"k": int(key), "g": int(key) % 3} for key in keys], override_num_blocks=8)
    assert column(dataset.sort("k", descending=descending), "k") == sorted(keys, reverse=descending)
    both = [(row["g"], row["k"]) for row in dataset.sort(["g", "k"], descending=[descending, False]).take_all()]
    assert both == sorted(
        ((n % 3, n) for n in range(5000)), key=lambda pair: (-pair[0] if descending else pair[0], pair[1])
    )


@pytest.mark.parametrize("name", ["SORT_SHUFFLE_PULL_BASED", "SORT_SHUFFLE_PUSH_BASED", "HASH_SHUFFLE", "SHUFFLE_V2"])
def test_ways_to_shuffle(ray: Any, name: str) -> None:
    from ray.data.context import ShuffleStrategy

    context = ray.data.DataContext.get_current()
    given, context.shuffle_strategy = context.shuffle_strategy, ShuffleStrategy[name]
    try:
        dataset = ray.data.range(600, override_num_blocks=6).map(lambda row: {"g": row["id"] % 3, "id": row["id"]})
        sums = dataset.groupby("g").sum("id").take_all()
        assert sorted((row["g"], row["sum(id)"]) for row in sums) == [(0, 59700), (1, 59900), (2, 60100)]
        assert column(dataset.sort("id", descending=True), "id") == list(range(599, -1, -1))
        assert sorted(column(dataset.random_shuffle(seed=1), "id")) == list(range(600))
    finally:
        context.shuffle_strategy = given


def test_groups_are_aggregated(ray: Any) -> None:
    from ray.data.aggregate import AggregateFnV2, Count, Max, Mean, Min, Quantile, Std, Sum, Unique

    frame = pd.DataFrame({"g": np.arange(900) % 7, "v": np.random.default_rng(1).normal(size=900)})
    dataset = ray.data.from_pandas(frame).repartition(6)
    found = dataset.groupby("g").aggregate(Count(), Sum("v"), Min("v"), Max("v"), Mean("v"), Std("v", ddof=1))
    wanted = frame.groupby("g")["v"].agg(["count", "sum", "min", "max", "mean", "std"])
    got = found.to_pandas().set_index("g").sort_index()
    assert np.allclose(got[["count()", "sum(v)", "min(v)", "max(v)", "mean(v)", "std(v)"]], wanted)
    assert dataset.groupby("g").count().take_all() and sorted(dataset.unique("g")) == list(range(7))
    assert np.isclose(dataset.mean("v"), frame["v"].mean()) and np.isclose(dataset.std("v"), frame["v"].std())
    assert dataset.aggregate(Quantile("v", q=0.5), Unique("g"))["quantile(v)"] == pytest.approx(frame["v"].median())

    class Range(AggregateFnV2):
        def __init__(self, on: str) -> None:
            super().__init__("range", lambda: None, on=on, ignore_nulls=True)

        def aggregate_block(self, block: Any) -> Any:
            values = ray.data.block.BlockAccessor.for_block(block).to_pandas()["v"]
            return [values.min(), values.max()]

        def combine(self, one: Any, other: Any) -> Any:
            return other if one is None else [min(one[0], other[0]), max(one[1], other[1])]

        def finalize(self, both: Any) -> Any:
            return both[1] - both[0]

    assert dataset.aggregate(Range("v"))["range"] == pytest.approx(frame["v"].max() - frame["v"].min())


def test_a_function_for_each_group(ray: Any) -> None:
    frame = pd.DataFrame({"g": [n % 4 for n in range(100)], "v": range(100)})
    centered = (
        ray.data.from_pandas(frame)
        .groupby("g")
        .map_groups(lambda group: {"g": group["g"], "v": group["v"] - group["v"].mean()})
    )
    got = centered.to_pandas().sort_values(["g", "v"]).to_numpy()
    wanted = frame.assign(v=frame["v"] - frame.groupby("g")["v"].transform("mean"))
    assert np.allclose(got, wanted.sort_values(["g", "v"]).to_numpy())


@pytest.mark.parametrize("kind", ["inner", "left_outer", "right_outer", "full_outer", "left_semi", "left_anti"])
def test_join(ray: Any, kind: str) -> None:
    pytest.importorskip("polars")
    left = ray.data.from_items([{"id": n, "double": 2 * n} for n in range(20)])
    right = ray.data.from_items([{"id": n, "square": n * n} for n in range(10, 30)])
    joined = left.join(right, join_type=kind, num_partitions=3, on=("id",)).take_all()
    both, ls, rs = range(10, 20), range(10), range(20, 30)
    wanted = {
        "inner": [*both],
        "left_outer": [*ls, *both],
        "right_outer": [*both, *rs],
        "full_outer": [*ls, *both, *rs],
        "left_semi": [*both],
        "left_anti": [*ls],
    }[kind]
    assert sorted(row["id"] for row in joined) == wanted
    for row in joined:
        if row["id"] in both:
            assert row["double"] == 2 * row["id"] and row.get("square", row["id"] ** 2) == row["id"] ** 2


def test_datasets_are_put_together(ray: Any) -> None:
    one = ray.data.range(10, override_num_blocks=3)
    other = one.map(lambda row: {"half": row["id"] / 2})
    assert one.zip(other).take_all() == [{"id": n, "half": n / 2} for n in range(10)]
    assert column(one.union(one, one).sort("id"), "id") == sorted([*range(10)] * 3)
    assert one.limit(4).count() == 4 and column(one.limit(4), "id") == [0, 1, 2, 3]


def test_expressions(ray: Any) -> None:
    from ray.data.datatype import DataType
    from ray.data.expressions import col, lit, udf

    @udf(DataType.int64())
    def plus_one(values: Any) -> Any:
        return pa.compute.add(values, 1)

    dataset = ray.data.range(10).with_column("twice", col("id") * 2 + lit(1)).with_column("next", plus_one(col("id")))
    assert dataset.filter(expr=(col("twice") > 9) & (col("id") != 7)).take_all() == [
        {"id": n, "twice": 2 * n + 1, "next": n + 1} for n in (5, 6, 8, 9)
    ]


def test_preprocessors(ray: Any) -> None:
    from ray.data import preprocessors

    frame = pd.DataFrame({"x": [0.0, 1.0, 2.0, 3.0], "c": ["a", "b", "a", "c"], "y": [1.0, None, 3.0, 2.0]})
    dataset = ray.data.from_pandas(frame)
    scaled = preprocessors.StandardScaler(columns=["x"]).fit_transform(dataset).to_pandas()["x"]
    assert np.allclose(scaled, (frame["x"] - 1.5) / np.std(frame["x"]))
    chain = preprocessors.Chain(
        preprocessors.SimpleImputer(columns=["y"], strategy="mean"),
        preprocessors.MinMaxScaler(columns=["x", "y"]),
        preprocessors.OrdinalEncoder(columns=["c"]),
        preprocessors.Concatenator(columns=["x", "c"], output_column_name="f"),
    )
    found = chain.fit_transform(dataset).take_all()
    assert [row["y"] for row in found] == [0.0, 0.5, 1.0, 0.5]
    assert np.allclose([row["f"] for row in found], [[0, 0], [1 / 3, 1], [2 / 3, 0], [1, 2]])
    assert chain.transform_batch({"x": np.array([3.0]), "c": np.array(["b"]), "y": np.array([2.0])})["y"].tolist() == [
        0.5
    ]
