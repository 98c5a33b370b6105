"""Ray Data, lent from Ray's wheel: files written and read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
np = pytest.importorskip("numpy")
pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")


@pytest.mark.parametrize("kind", ["parquet", "csv", "json"])
def test_tables_are_written_and_read(ray: Any, kind: str, tmp_path: Path) -> None:
    frame = pd.DataFrame({"n": range(200), "x": np.arange(200) / 8, "s": [f"row {n}" for n in range(200)]})
    dataset = ray.data.from_pandas(frame).repartition(4)
    getattr(dataset, f"write_{kind}")(str(tmp_path / "out"))
    assert len(list((tmp_path / "out").iterdir())) == 4
    again = getattr(ray.data, f"read_{kind}")(str(tmp_path / "out"))
    assert again.count() == 200
    pd.testing.assert_frame_equal(again.sort("n").to_pandas(), frame, check_dtype=False)


def test_parquet_reads_only_what_is_asked_for(ray: Any, tmp_path: Path) -> None:
    from ray.data.expressions import col

    frame = pd.DataFrame({"n": range(100), "even": [n % 2 == 0 for n in range(100)], "x": 1.0})
    ray.data.from_pandas(frame).write_parquet(str(tmp_path / "out"), partition_cols=["even"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["even=false", "even=true"]
    dataset = ray.data.read_parquet(str(tmp_path / "out"), columns=["n"])
    assert dataset.schema().names == ["n"] and dataset.sum("n") == 4950
    some = ray.data.read_parquet(str(tmp_path / "out")).filter(expr=col("n") >= 90)
    assert sorted(row["n"] for row in some.take_all()) == list(range(90, 100))


def test_images_bytes_text_and_arrays(ray: Any, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for number in range(3):
        image.fromarray(np.full((8, 6, 3), 10 * number, np.uint8)).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.bin").write_bytes(bytes([number]) * 5)
        (tmp_path / f"{number}.txt").write_text(f"line {number}\nand more\n")
        np.save(tmp_path / f"{number}.npy", np.full((2, 2), number))
    images = ray.data.read_images(str(tmp_path), file_extensions=["png"], include_paths=True).take_all()
    assert {(Path(row["path"]).stem, row["image"].shape, int(row["image"].max())) for row in images} == {
        (str(n), (8, 6, 3), 10 * n) for n in range(3)
    }
    raw = ray.data.read_binary_files([str(tmp_path / f"{n}.bin") for n in range(3)]).take_all()
    assert sorted(row["bytes"] for row in raw) == [bytes([n]) * 5 for n in range(3)]
    text = ray.data.read_text(str(tmp_path), file_extensions=["txt"]).take_all()
    assert sorted(row["text"] for row in text) == ["and more"] * 3 + [f"line {n}" for n in range(3)]
    arrays = ray.data.read_numpy([str(tmp_path / f"{n}.npy") for n in range(3)]).take_all()
    assert sorted(int(row["data"].sum()) for row in arrays) == [0, 4, 8] or len(arrays) == 6
    written = ray.data.from_numpy(np.arange(12).reshape(3, 4))
    written.write_numpy(str(tmp_path / "arrays"), column="data")
    assert ray.data.read_numpy(str(tmp_path / "arrays")).count() == 3


def test_sources_and_sinks_of_ones_own(ray: Any) -> None:
    from ray.data import Datasink, Datasource, ReadTask
    from ray.data.block import BlockMetadata

    class Squares(Datasource):
        def estimate_inmemory_data_size(self) -> int:
            return 1000

        def get_read_tasks(self, parallelism: int, per_task_row_limit: Any = None, data_context: Any = None) -> Any:
            def read(start: int) -> Any:
                return lambda: [pd.DataFrame({"square": [n * n for n in range(start, start + 10)]})]

            metadata = BlockMetadata(num_rows=10, size_bytes=100, input_files=None, exec_stats=None)
            return [ReadTask(read(start), metadata) for start in (0, 10, 20)]

    class Sum(Datasink):
        def write(self, blocks: Any, ctx: Any) -> Any:
            return sum(
                int(pd.DataFrame(block.to_pandas() if hasattr(block, "to_pandas") else block)["square"].sum())
                for block in blocks
            )

        def on_write_complete(self, write_result: Any) -> None:
            self.total = sum(write_result.write_returns)

    dataset, sink = ray.data.read_datasource(Squares()), Sum()
    dataset.write_datasink(sink)
    assert sink.total == sum(n * n for n in range(30)) == dataset.sum("square")


def test_a_file_that_is_not_there_is_named(ray: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ray.data.read_csv(str(tmp_path / "nowhere")).count()
