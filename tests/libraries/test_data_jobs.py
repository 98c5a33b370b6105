"""Ray Data, lent from Ray's wheel: data that is larger than the stores, on one node and on two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "events.py"
STORE = 100 << 20

FREED = """
import numpy as np
import ray

ray.init(object_store_memory=100 << 20)
context = ray.data.DataContext.get_current()
context.enable_progress_bars = False


def make(batch):
    return {"x": np.ones((len(batch["id"]), 1 << 20))}


dataset = ray.data.range(60, override_num_blocks=60).map_batches(make, batch_size=1)
dataset = dataset.map_batches(lambda batch: {"sum": batch["x"].sum(axis=1)}, batch_size=1, num_cpus=0.5)
assert dataset.sum("sum") == 60 << 20
print(ray._private.internal_api.memory_summary(stats_only=True))
"""


def test_a_pipeline_that_streams_writes_nothing_to_disk(run: Callable[..., str], tmp_path: Path) -> None:
    """480 MB go through a store of 100 MB: blocks are freed when they are used, and producers wait for that."""
    program = tmp_path / "program.py"
    program.write_text(FREED)
    shown = run(program, options=("--num-cpus", "2"))
    spilled = re.search(r"Spilled (\d+) MiB", shown)
    assert spilled is None or int(spilled[1]) < 100, shown


def test_events_on_one_node(run: Callable[..., str], tmp_path: Path) -> None:
    options = ("--num-cpus", "2", "--object-store-memory", str(STORE))
    shown = run(EXAMPLE, str(tmp_path), "--mb", "200", options=options, env={"HPCRAY_PRELOAD": "ray.data"})
    assert "object stores of 100 MiB" in shown and "nothing lost, all in order" in shown


@pytest.mark.mpi
def test_events_on_two_nodes(libraries: str, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "hpcray.cli.launch", "-n", "2", "--cpus-per-node", "1", "--object-store", "64m"]
    ended = subprocess.run(
        [*launch, "--ray-libraries", libraries, str(EXAMPLE), str(tmp_path), "--mb", "200"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HPCRAY_PRELOAD": "ray.data"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-6000:]}"
    assert "object stores of 128 MiB" in ended.stdout and "nothing lost, all in order" in ended.stdout
