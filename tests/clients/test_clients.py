"""Packages that nobody here wrote, from PyPI, unmodified, on hpcray; docs/ray-packages.md has a row for each."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from .environments import ROOT, WANTED, environment, libraries

PROGRAMS = Path(__file__).parent / "programs"


def needs_pypi(function: Any) -> Any:
    """Mark a test that installs packages."""
    return pytest.mark.clients(pytest.mark.timeout(1800)(function))


def results(
    program: str, name: str = "", *arguments: str, lent: bool = False, more: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run a program in an environment (the one of its name). It prints a line of JSON among what workers print."""
    used = environment(name or program)
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ["PATH"] = used.bin + os.pathsep + environ["PATH"]
    if lent:
        environ["HPCRAY_RAY_LIBRARIES"] = libraries()
    with tempfile.TemporaryDirectory() as place:
        ended = subprocess.run(
            [used.python, str(PROGRAMS / f"use_{program}.py"), *arguments],
            cwd=place, env=environ | {"HOME": place} | (more or {}),
            capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-6000:]}"
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith('{"ray": '))
    found: dict[str, Any] = json.loads(line)
    assert found.pop("ray").endswith(os.path.join("hpcray", "compat", "standin", "ray", "__init__.py"))
    return found


def test_the_documentation_has_a_row_with_the_version_of_each_package() -> None:
    """The rest is left out unless asked for; this reads two files."""
    page = (ROOT / "docs" / "ray-packages.md").read_text()
    rows = dict(re.findall(r"^\| ([\w.-]+) \| ([\d.]+) \|", page, re.MULTILINE))
    pinned = {}
    for calls in WANTED.values():
        for wanted in (word for call in calls for word in call if "==" in word):
            package, version = wanted.split("==")
            pinned[package.split("[")[0].replace("_", "-")] = version
    assert len(rows) >= 20
    assert {name: pinned.get(name) for name in rows} == rows
    assert set(re.findall(r"programs/(use_\w+\.py)", page)) == {path.name for path in PROGRAMS.glob("use_*.py")}


@needs_pypi
def test_a_grid_search_of_scikit_learn_through_joblib() -> None:
    found = results("joblib", "numeric")
    assert found["best"] == found["serial_best"]
    assert found["score"] == pytest.approx(found["serial_score"])
    assert found["pids"] > 0


@needs_pypi
def test_a_dask_array_computation() -> None:
    found = results("dask", "numeric")
    assert found["error"] < 1e-9
    assert found["tasks_elsewhere"]


@needs_pypi
def test_modin_reads_groups_and_merges() -> None:
    found = results("modin", "numeric")
    assert found == {"engine": "Ray", "read": True, "groupby": True, "merge": True, "apply": True}


@needs_pypi
def test_xgboost_ray_trains() -> None:
    found = results("xgboost_ray")
    assert found["accuracy"] > 0.9
    assert found["predicted"] == found["rows"]


@needs_pypi
def test_lightgbm_ray_trains() -> None:
    found = results("lightgbm_ray")
    assert found["error"] < 0.05 and found["right"] > 0.95


@needs_pypi
def test_dafts_ray_runner() -> None:
    found = results("daft", "tables")
    assert found["sums"] == [sum(a for a in range(10, 1000) if a % 7 == b) for b in range(7)]
    assert found["names"] == [f"n{a % 7}" for a in range(9)]
    assert (found["doubled"], found["repartitioned"]) == ([999_000], 1000)


@needs_pypi
def test_smallpond_partitions_and_queries() -> None:
    assert results("smallpond")["rows"] == [["a", 0, 96], ["b", 1, 97], ["c", 2, 98], ["d", 3, 99]]


@needs_pypi
def test_a_flow_of_prefect() -> None:
    assert results("prefect", "pipelines")["found"] == [[0, 1, 4, 9], 81, True]


@needs_pypi
def test_a_dataflow_of_hamilton() -> None:
    assert results("hamilton", "pipelines")["total"] == 100


@needs_pypi
def test_a_pipeline_of_datatrove() -> None:
    assert results("datatrove", "pipelines")["kept"] == [29] * 4


@needs_pypi
def test_a_pipeline_of_distilabel() -> None:
    assert results("distilabel", "pipelines")["lengths"] == list(range(20))


@needs_pypi
def test_a_pipeline_of_nemo_curator_on_two_executors() -> None:
    assert results("nemo_curator")["kept"] == [50, 50]


@needs_pypi
def test_torchrls_collector_and_replay_buffer() -> None:
    assert results("torchrl", "learning") == {"frames": 400, "held": 100, "sample": [16], "of_the_data": True}


@needs_pypi
def test_tianshous_environments_are_actors() -> None:
    assert results("tianshou", "learning") == {"shape": [3, 4], "rewards": 15.0, "two_of_three": 2}


@needs_pypi
def test_evotorch_searches_with_actors() -> None:
    found = results("evotorch", "learning")
    assert found["last"] < 0.1 < found["first"]


@needs_pypi
def test_fugue_transforms_parts_and_joins() -> None:
    assert results("fugue", "numeric", lent=True) == {"ranks": True, "joined": True}


@needs_pypi
def test_statsforecast_on_fugues_engine() -> None:
    found = results("statsforecast", "numeric", lent=True)
    assert found == {"rows": 40, "same_naive": True, "same_ets": True}


@needs_pypi
def test_pymoo_evaluates_individuals_in_tasks() -> None:
    assert results("pymoo", "numeric") == {"points": 12, "same": True}


@needs_pypi
def test_sktime_forecasts_windows_and_panels() -> None:
    found = results("sktime", "numeric")
    assert found == {"windows": 4, "same_windows": True, "forecasts": 9, "same_forecasts": True}


@needs_pypi
def test_optuna_and_hyperopt_search_in_tune() -> None:
    found = results("optuna", "numeric", lent=True)
    for name in ("optuna", "hyperopt"):
        assert found[name]["trials"] == 16 and found[name]["error"] < 1e-9 and found[name]["best"] < 2


@needs_pypi
def test_flaml_tunes_and_fits() -> None:
    found = results("flaml", "numeric", lent=True)
    assert found["loss"] == found["right_loss"] <= 4
    assert found["accuracy"] > 0.9


@needs_pypi
def test_cubed_multiplies_in_bounded_memory() -> None:
    assert results("cubed", "pipelines") == {"product": True, "mean": True}


@needs_pypi
def test_a_job_of_dagster_whose_steps_are_jobs_of_ray() -> None:
    assert results("dagster_ray", "pipelines") == {"success": True, "found": {"sum": 14, "pids": 4}}


@needs_pypi
def test_econmls_folds_are_tasks() -> None:
    found = results("econml", "tables")
    assert found["same"] and found["error"] < 0.2


@needs_pypi
def test_lance_ray_writes_widens_and_reads() -> None:
    found = results("lance_ray", "tables", lent=True)
    assert found == {"fragments": 4, "rows": 1000, "same_ids": True, "same_values": True}


@needs_pypi
def test_feast_joins_features_at_points_in_time() -> None:
    assert results("feast", "tables", lent=True) == {"rows": 20, "history": True}


@needs_pypi
def test_deephypers_evaluator() -> None:
    found = results("deephyper", "learning")
    assert found["rows"] >= 12 and found["error"] < 1e-9 and found["elsewhere"]


@needs_pypi
def test_flowers_federation_averages() -> None:
    """The clients' numbers are 1 to 4, weighted by themselves: their mean is 3, and a round goes half the way to it."""
    found = results("flwr")
    assert found["found"] == pytest.approx([1.5, 2.25, 2.625]) and found["pids"] > 0


@needs_pypi
def test_hydras_multirun() -> None:
    assert results("hydra") == {"values": [10, 20, 20, 30, 40, 60], "elsewhere": True}


@needs_pypi
def test_verls_worker_groups() -> None:
    found = results("verl")
    assert (found["one_to_all"], found["other"], found["zero"]) == ([1, 1], [10, 10], 0)
    assert found["data_parallel"] == found["expected"]
    assert found["ranks"] == [0, 1]


@needs_pypi
def test_verls_trainer_learns_and_repeats_itself() -> None:
    """GRPO of 3 steps without a GPU; a second run with the same seed has the same losses."""
    preload = {"HPCRAY_PRELOAD": "verl.trainer.ppo.v1", "HPCRAY_WORKER_START_TIMEOUT": "600"}
    found = results("verl_trainer", "verl", more=preload)["steps"]
    assert len(found) == 3
    assert all(0 < step["actor/grad_norm"] < 10 for step in found), "each step changes the model"
    assert all(step["critic/score/mean"] > 0 and step["response_length/mean"] > 1 for step in found)
    for step, again in zip(found, results("verl_trainer", "verl", more=preload)["steps"], strict=True):
        assert step == pytest.approx(again, rel=1e-3, abs=1e-5)


@needs_pypi
def test_verls_batches_as_device_objects_give_the_same_weights() -> None:
    found = [results("verl_device_objects", "verl", way) for way in ("auto", "object_store")]
    assert found[0] == found[1] and len(set(found[0]["rewards"])) > 1
