"""Runs of jobs of `hpcray submit` on this machine: their history has the name of the session, their user the pid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcray.cli.__main__ import main
from hpcray.history.block_file import FIRST_LINE, pack
from hpcray.history.records import Began, Ended, Functions, encode
from hpcray.history.runs import file_name
from hpcray.jobs.submitted_job import JobRecord, make_folder

PID, BEGAN = "4194300", 1_790_000_000.0  # a pid that no process here has: the job has ended
RUNS = ("0123456789abcdef", "fedcba9876543210")


def write_run(root: Path, run: str, folder: Path | str) -> None:
    directory = root / run / run
    directory.mkdir(parents=True, mode=0o700)
    began = Began(BEGAN, run, run, 0, 1, "host", 1, 1, "", "/home/u/t.py", {"CPU": 1.0}, submitted=str(folder))
    ended = [Functions(BEGAN + 1, {"f": [3, 1, 200, {10: 2}]}), Ended(BEGAN + 2, 0)]
    (directory / file_name(0, 0)).write_bytes(FIRST_LINE + pack(encode([began, *ended])))


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ended job of `hpcray submit`, and a job that nobody submitted."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCRAY_HISTORY_DIR", str(tmp_path / "history"))
    monkeypatch.setenv("PATH", str(tmp_path))  # without a Slurm
    folder = make_folder(tmp_path / ".hpcray-jobs", "mine")
    JobRecord(PID, "mine", "local", 1, BEGAN, None, 1, ("t.py",)).write(folder)
    write_run(tmp_path / "history", RUNS[0], folder)
    write_run(tmp_path / "history", RUNS[1], "")
    return folder


def run(*words: str) -> str:
    done = CliRunner().invoke(main, list(words))
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("name", [PID, "mine", "folder", RUNS[0], RUNS[0][:6]])
def test_an_ended_local_job_is_found_by_every_name_in_every_command(
    submitted: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, elsewhere: bool
) -> None:
    name = submitted.name if name == "folder" else name
    if elsewhere:
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert json.loads(run("status", "--job", name, "--json"))["run"] == RUNS[0]
    summary = json.loads(run("summary", "tasks", "--job", name, "--json"))["summary"]
    assert summary["f"]["state_counts"] == {"FINISHED": 2, "FAILED": 1}
    assert json.loads(run("list", "nodes", "--job", name, "--json"))[0]["host"] == "host"
    assert json.loads(run("timeline", "--job", name, "--json")) == []
    assert run("why", "--job", name)
    page = tmp_path / "out.html"
    assert json.loads(run("report", "--job", name, "--json", str(page)))["run"] == RUNS[0]
    assert page.read_text().startswith("<!")


def test_hpcray_jobs_lists_it_once_with_both_names(submitted: Path) -> None:
    rows = json.loads(run("jobs", "--json"))
    assert {(row["job_id"], row["run"]) for row in rows} == {(PID, RUNS[0]), (RUNS[1], RUNS[1])}


def test_its_history_is_removed_by_its_id(submitted: Path, tmp_path: Path) -> None:
    assert [row["run"] for row in json.loads(run("jobs", "rm", PID, "--json"))] == [RUNS[0]]
    assert {path.name for path in (tmp_path / "history").iterdir()} == {RUNS[1]}
