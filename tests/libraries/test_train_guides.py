"""Ray Train, lent from Ray's wheel: what its guides show beyond a first run; all but the last also on Ray itself."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

for needed in ("pandas", "pyarrow", "fsspec", "requests"):
    pytest.importorskip(needed)

PROGRAMS = Path(__file__).parent / "programs"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def results(run: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    """Run a program of this directory; what it prints last."""

    def program(name: str) -> dict[str, Any]:
        shown = run(PROGRAMS / f"{name}.py", options=("--num-cpus", "8"))
        found: dict[str, Any] = json.loads([line for line in shown.splitlines() if line.startswith("{")][-1])
        return found

    return program


def test_checkpoints_are_uploaded_scored_and_validated(results: Callable[..., Any]) -> None:
    found = results("train_checkpoints")
    both = [".metadata.json", "part0", "part1"]
    modes = found["modes"]
    assert modes["files"] == {"async-0": both, "no_upload-2": both, "sync-1": both}, "the files of both workers"
    names = [("async-0", 0), ("sync-1", 1), ("no_upload-2", 2)]
    assert modes["returned"]["reported"] == [[name, {"step": step}, "COMMITTED"] for name, step in names]
    assert modes["returned"]["local"] == [False, True, True], "what is uploaded meanwhile is removed afterwards"
    assert modes["metadata"] == {"step": 2, "by": 0, "more": True}
    linked = [".metadata.json.linked", "part0.linked", "part1.linked"]
    assert found["custom"]["files"] == {"own": linked}, "by the program's own function"
    scored = found["scored"]
    assert scored["best"] == [["c3", {"score": 7}], ["c1", {"score": 9}]]
    assert (scored["latest"], sorted(scored["files"])) == ("c4", ["c1", "c3", "c4"]), "the newest is kept too"
    validated = found["validated"]
    assert validated["returned"] == [
        ["v0", {"step": 0, "judged": 1}, "VALIDATED"], ["v1", {"step": 1}, "VALIDATION_FAILED"],
        ["v2", {"step": 2, "judged": 30}, "VALIDATED"], ["v3", {"step": 3}, "COMMITTED"],
    ]  # fmt: skip
    judged = validated["frame"]["judged"]
    assert [None if math.isnan(value) else value for value in judged] == [1, None, 30, None]
    assert validated["again"] == ["v0", "v1", "v2", "v3"], "Result.from_path finds them"


def test_contexts_backends_errors_and_local_runs(results: Callable[..., Any]) -> None:
    found = results("train_basics")
    context = found["context"]
    assert (context["world"], context["local"]) == ([0, 2], [0, 2, 0])
    assert context["told"] == {"rank": 0, "list": [1, 2]}
    assert context["environ"] == "context", "variables of the run's workers"
    assert (found["half"]["world"], found["half"]["resources"]) == ([0, 3], {"CPU": 0.5})
    assert found["elastic"] == [0, 3], "as many workers as fit"
    assert found["backend"] == ["10", "yes", "10"]
    assert found["shutdown"] == "['10', '11']\n"
    assert found["wrong own"] == ["WorkerGroupError", {"0": "OwnError(3, {'a': 1})"}]
    assert found["local"] == [{"sum": 10}, [1, [0, 1, 2, 3, 4]], True], "in the program's own process"


def test_from_parquet_files_to_losses(results: Callable[..., Any]) -> None:
    pytest.importorskip("torch")
    found = results("train_parquet")
    shuffled, ordered = found["one, shuffled twice"], found["two, in order"]
    assert ordered["order"] == [1, 75, 150, 225, 299, 374, 449] * 2, "batches of 32 rows, without each seventh row"
    assert shuffled["order"][:5] == [412, 422, 260, 486, 382]
    assert shuffled["losses"] == pytest.approx([7.5798366, 1.9316330], rel=1e-4), "by both engines"
    assert ordered["losses"] == pytest.approx([8.1556396, 5.4294907], rel=1e-4)
    assert [shuffled["check"], ordered["check"]] == pytest.approx([0.2782044, 4.7796149], rel=1e-4)


def test_xgboost_on_parts_of_datasets_goes_on_after_a_failure(results: Callable[..., Any]) -> None:
    pytest.importorskip("xgboost")
    found = results("train_boost")
    assert found["returned"] == {"start": 4, "rows": 300}, "from the checkpoint after four rounds"
    assert (found["rounds"], found["kept"]) == (12, 1)
    assert found["metrics"] == {"check-error": 0.075, "check-logloss": 0.1657}
    assert found["predicted"][:4] == [0.987, 0.912, 0.02, 0.288]


def test_hugging_face_on_datasets_goes_on_after_a_failure(results: Callable[..., Any]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    found = results("train_huggingface")
    assert found["step"] == 12
    assert found["trainer"]["resumed"] == ["checkpoint"]
    assert found["accelerated"]["processes"] == 2
    losses = found["accelerated"]["losses"]
    assert losses[0] > losses[1] > losses[2]


def test_a_search_over_runs_stops_the_bad_ones(results: Callable[..., Any]) -> None:
    found = results("train_search")
    assert found["scores"] == [[1, 4], [2, 8], [3, 12]]
    assert found["reports"] == [[1, 4], [2, 4], [3, 4]]
    assert (found["best"], found["errors"]) == ([3, 4], 0)
    assert found["stopped"] == [[1, 2], [2, 4], [3, 4]], "the worst half of those so far"


@pytest.mark.skipif(os.environ.get("HPCRAY_TEST_ENGINE") == "ray", reason="hpcray alone has it")
def test_workers_listen_on_loopback_alone_and_are_mpi_ranks(results: Callable[..., Any]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("mpi4py")
    found = results("train_network")
    assert found["torch"] == {"total": 2.0, "listening": [["127.0.0.1"]] * 2, "master": "127.0.0.1"}
    for how in ("exit", "raise"):
        assert found[how] == {"sum": 3, "torch": 3.0, "processes": 3, "ports": ["127.0.0.1"]}, how
