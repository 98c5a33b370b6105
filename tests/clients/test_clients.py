"""Packages that nobody here wrote, from PyPI, unmodified, on hpcray: each in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .environments import ROOT, Environment

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]


def results(name: str, program: str = "", *arguments: str, **variables: str) -> dict[str, Any]:
    """Run a program in its environment. It prints one line of JSON, beside what its workers print."""
    environment = Environment(name)
    environment.make()
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ |= variables
    ended = subprocess.run(
        [environment.python, str(PROGRAMS / f"use_{program or name}.py"), *arguments],
        cwd=ROOT / "tests", env=environ, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-6000:]}"
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith('{"ray": '))
    found: dict[str, Any] = json.loads(line)
    assert found.pop("ray").endswith(os.path.join("hpcray", "compat", "standin", "ray", "__init__.py"))
    return found


def test_a_grid_search_of_scikit_learn_through_joblib() -> None:
    found = results("joblib")
    assert found["best"] == found["serial_best"]
    assert found["score"] == pytest.approx(found["serial_score"])
    assert found["pids"] > 0


def test_a_dask_array_computation() -> None:
    found = results("dask")
    assert found["error"] < 1e-9
    assert found["tasks_elsewhere"]


def test_modin_reads_groups_and_merges() -> None:
    found = results("modin")
    assert found == {"engine": "Ray", "read": True, "groupby": True, "merge": True, "apply": True}


def test_xgboost_ray_trains() -> None:
    found = results("xgboost_ray")
    assert found["accuracy"] > 0.9
    assert found["predicted"] == found["rows"]


def test_lightgbm_ray_trains() -> None:
    found = results("lightgbm_ray")
    assert found["error"] < 0.05 and found["right"] > 0.95


def test_dafts_ray_runner() -> None:
    found = results("daft")
    assert found["sums"] == [sum(a for a in range(10, 1000) if a % 7 == b) for b in range(7)]
    assert found["names"] == [f"n{a % 7}" for a in range(9)]
    assert (found["doubled"], found["repartitioned"]) == ([999_000], 1000)


def test_smallpond_partitions_and_queries() -> None:
    assert results("smallpond")["rows"] == [["a", 0, 96], ["b", 1, 97], ["c", 2, 98], ["d", 3, 99]]


def test_a_flow_of_prefect() -> None:
    assert results("prefect")["found"] == [[0, 1, 4, 9], 81, True]


def test_a_dataflow_of_hamilton() -> None:
    assert results("hamilton")["total"] == 100


def test_a_pipeline_of_datatrove() -> None:
    assert results("datatrove")["kept"] == [29] * 4


def test_a_pipeline_of_distilabel() -> None:
    assert results("distilabel")["lengths"] == list(range(20))


def test_a_pipeline_of_nemo_curator_on_two_executors() -> None:
    assert results("nemo_curator")["kept"] == [50, 50]


def test_torchrls_collector_and_replay_buffer() -> None:
    assert results("torchrl") == {"frames": 400, "held": 100, "sample": [16], "of_the_data": True}


def test_tianshous_environments_are_actors() -> None:
    assert results("tianshou") == {"shape": [3, 4], "rewards": 15.0, "two_of_three": 2}


def test_evotorch_searches_with_actors() -> None:
    found = results("evotorch")
    assert found["last"] < 0.1 < found["first"]


def test_verls_worker_groups() -> None:
    found = results("verl")
    assert (found["one_to_all"], found["other"], found["zero"]) == ([1, 1], [10, 10], 0)
    assert found["data_parallel"] == found["expected"]
    assert found["ranks"] == [0, 1]


def test_verls_trainer_learns_and_repeats_itself() -> None:
    """GRPO of 3 steps without a GPU; a second run with the same seed has the same losses."""
    preload = {"HPCRAY_PRELOAD": "verl.trainer.ppo.v1", "HPCRAY_WORKER_START_TIMEOUT": "600"}
    found = results("verl", "verl_trainer", **preload)["steps"]
    assert len(found) == 3
    assert all(0 < step["actor/grad_norm"] < 10 for step in found), "each step changes the model"
    assert all(step["critic/score/mean"] > 0 and step["response_length/mean"] > 1 for step in found)
    for step, again in zip(found, results("verl", "verl_trainer", **preload)["steps"], strict=True):
        assert step == pytest.approx(again, rel=1e-3, abs=1e-5)


def test_verls_batches_as_device_objects_give_the_same_weights() -> None:
    found = [results("verl", "verl_device_objects", way) for way in ("auto", "object_store")]
    assert found[0] == found[1] and len(set(found[0]["rewards"])) > 1
