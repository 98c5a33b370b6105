"""Ray Data, lent from Ray's wheel: datasets mixed, columns of lists and structs, ids, downloads, SQL, lookups."""

from __future__ import annotations

import datetime
import sqlite3
from pathlib import Path
from typing import Any

import pytest

for needed in ("pandas", "pyarrow", "fsspec"):
    pytest.importorskip(needed)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def column(dataset: Any, name: str) -> list[Any]:
    return [row[name] for row in dataset.take_all()]


def test_datasets_are_mixed(ray: Any) -> None:
    few = ray.data.from_items([{"x": number} for number in range(20)]).repartition(5)
    more = ray.data.from_items([{"x": 100 + number} for number in range(10)]).repartition(5)
    assert sorted(column(few.mix(more), "x")) == [*range(20), *range(100, 110)]
    shortest = ray.data.MixStoppingCondition.STOP_ON_SHORTEST
    mixed = column(few.mix(more, weights=[0.5, 0.5], stopping_condition=shortest), "x")
    assert sum(number >= 100 for number in mixed) == 10
    with pytest.raises(ValueError, match="must match number of weights"):
        few.mix(more, weights=[1])


def test_columns_of_lists_structs_and_times(ray: Any) -> None:
    from ray.data.expressions import col

    dataset = ray.data.from_items(
        [
            {"list": [3, 1, 2], "struct": {"a": 1, "b": "x"}, "time": datetime.datetime(2024, 3, 5, 6, 7, 8)},
            {"list": [5], "struct": {"a": 2, "b": "y"}, "time": datetime.datetime(2025, 1, 1)},
        ]
    )
    wanted = {
        "length": (col("list").list.len(), [1, 3]),
        "first": (col("list").list.get(0), [3, 5]),
        "sorted": (col("list").list.sort(), [[1, 2, 3], [5]]),
        "field": (col("struct").struct.field("b"), ["x", "y"]),
        "year": (col("time").dt.year(), [2024, 2025]),
        "month": (col("time").dt.strftime("%Y-%m"), ["2024-03", "2025-01"]),
    }
    made = dataset.with_columns({name: expression for name, (expression, _) in wanted.items()}).take_all()
    for name, (_, values) in wanted.items():
        found = [list(row[name]) if name == "sorted" else row[name] for row in made]
        assert sorted(found) == values, name


def test_rows_get_ids(ray: Any) -> None:
    from ray.data.expressions import monotonically_increasing_id, random, uuid

    dataset = ray.data.range(10, override_num_blocks=3)
    for expression in (monotonically_increasing_id(), uuid(), random(seed=3)):
        assert len(set(column(dataset.with_column("made", expression), "made"))) == 10


def test_files_that_rows_name_are_read(ray: Any, tmp_path: Path) -> None:
    from ray.data.expressions import download

    for size in (1, 2, 3):
        (tmp_path / str(size)).write_bytes(b"x" * size)
    dataset = ray.data.from_items([{"uri": str(tmp_path / str(size))} for size in (1, 2, 3)])
    assert sorted(map(len, column(dataset.with_column("bytes", download("uri")), "bytes"))) == [1, 2, 3]


def test_sql(ray: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "database")

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(path)

    with connect() as connection:
        connection.execute("create table given (number int, name text)")
        connection.executemany("insert into given values (?, ?)", [(number, f"n{number}") for number in range(10)])
        connection.execute("create table made (number int)")
    assert sorted(column(ray.data.read_sql("select * from given where number > 5", connect), "name")) == [
        "n6", "n7", "n8", "n9",
    ]  # fmt: skip
    ray.data.from_items([{"number": 1}, {"number": 2}]).write_sql("insert into made values (?)", connect)
    with connect() as connection:
        assert sorted(connection.execute("select number from made")) == [(1,), (2,)]


def test_rows_are_looked_up(ray: Any) -> None:
    doubled = ray.data.range(50).add_column("doubled", lambda batch: batch["id"] * 2)
    lookup = doubled.to_random_access_dataset("id", num_workers=2)
    assert ray.get(lookup.get_async(7))["doubled"] == 14
    found = lookup.multiget([1, 2, 99])
    assert [row and row["doubled"] for row in found] == [2, 4, None]
