"""Ray Train, lent from Ray's wheel: whole programs, as its guides show them. The same programs run on Ray itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

for needed in ("pandas", "pyarrow", "fsspec", "requests"):
    pytest.importorskip(needed)

PROGRAMS = Path(__file__).parent / "programs"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def results(run: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    """Run a program of this directory; what it prints last."""

    def program(name: str, *arguments: str) -> dict[str, Any]:
        shown = run(PROGRAMS / f"{name}.py", *arguments, options=("--num-cpus", "8"))
        found: dict[str, Any] = json.loads([line for line in shown.splitlines() if line.startswith("{")][-1])
        return found

    return program


def test_torch_workers_report_checkpoint_and_go_on(results: Callable[..., Any]) -> None:
    pytest.importorskip("torch")
    found = results("train_torch")
    assert (found["first"], found["second"]) == ([4, 0], [7, 5]), "the second run goes on after the first"
    assert found["slope"] == pytest.approx(3.0, abs=0.2)
    assert found["kept"] == 2
    assert found["returned"] == {
        "rank": 0, "size": 2, "local": 2, "device": "cpu", "ddp": "DistributedDataParallel", "backend": "gloo",
        "name": "line",
    }  # fmt: skip
    assert found["path"] == "line"
    assert found["columns"] == ["epoch", "loss", "started"]
    assert found["files"].count("checkpoint") == 3, "two checkpoints and their list"


def test_workers_that_die_or_raise_are_started_again(results: Callable[..., Any]) -> None:
    found = results("train_failures")
    for how in ("exit", "raise"):
        assert found[how]["step"] == 3
        assert found[how]["start"] in (1, 2), "from the newest checkpoint that had been taken in"
        assert found[how]["files"] == ["rank0", "rank1", "step"], "the files of all workers are one checkpoint"
        assert found[how]["told"] == {"from": 0, "pid": 1}
        assert found[how]["callbacks"] == ["[1]"]
    assert found["always"]["error"] == "WorkerGroupError"
    assert found["always"]["failures"] == {"0": "never works, rank 0", "1": "never works, rank 1"}
    assert found["always"]["callbacks"] == ["[0, 1]", "[0, 1]"]
    alive, groups, free = found["left"]
    assert "PlacementGroupCleaner" not in alive
    assert "RayTrainWorker" not in alive
    assert (groups, free) == (0, True)


def test_datasets_are_split_between_workers(results: Callable[..., Any]) -> None:
    pytest.importorskip("torch")
    once = [200.0, 19900.0, float(sum(number**2 for number in range(200)))]
    assert results("train_data") == {"totals": [once, once], "whole": 1225, "kinds": ["torch.float32"]}


def test_xgboost(results: Callable[..., Any]) -> None:
    pytest.importorskip("xgboost")
    found = results("train_xgboost")
    assert found["rounds"] == 10
    assert found["error"] < 0.1


def test_transformers(results: Callable[..., Any]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    assert results("train_transformers") == {"epoch": 2.0, "step": 8, "model": True}


def test_trainers_inside_of_a_search(results: Callable[..., Any]) -> None:
    assert results("train_tune") == {"values": [10, 20, 30], "best": 3}


def test_the_example_goes_on_where_it_ended(run: Callable[..., str], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    accuracy = 0.0
    for epochs, started in ((2, 0), (6, 2)):
        shown = run(
            EXAMPLES / "train_torch.py", "--storage", str(tmp_path), "--epochs", str(epochs),
            options=("--num-cpus", "8"),
        )  # fmt: skip
        found = re.search(rf"epoch {epochs}, started at {started}: accuracy (\S+) on 360 held-out images", shown)
        assert found, shown
        assert float(found[1]) >= accuracy
        accuracy = float(found[1])
    assert accuracy > 0.85
