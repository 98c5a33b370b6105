"""Which running job a command means: by name, by the environment, or as the only one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcray.history.runs import JobNames, jobs_meant
from hpcray.platform.session_directory import ADDRESS, OWN_SESSION, SessionDirectory
from hpcray.processes.running_jobs import (
    NoRunningJobError,
    SeveralRunningJobsError,
    find_running_job,
    running_jobs,
)


@pytest.fixture
def environ(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Variables of a user who has no job yet, and whose shell is in no allocation."""
    path = str(tmp_path_factory.mktemp("s"))
    monkeypatch.setenv("HPCRAY_TMPDIR", path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    yield {"HPCRAY_TMPDIR": path}
    assert list(Path(path).iterdir()) == []


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Function that makes a node of a job."""
    made: list[SessionDirectory] = []

    def make(session: str, slurm_job: str = "", node: int = 0, nodes: int = 1) -> str:
        monkeypatch.setenv("SLURM_JOB_ID", slurm_job)
        made.append(SessionDirectory.create())
        made[-1].driver = ["train.py", "--epochs", "3"]
        made[-1].publish(session, node, f"{len(made):056x}", nodes)
        return made[-1].path

    yield make
    for session in made:
        session.remove()


def test_without_a_job_there_is_nothing_to_find(environ: dict[str, str]) -> None:
    for wanted in (None, "auto", "4711", "/tmp/no-such-session"):
        with pytest.raises(NoRunningJobError, match="no (live|running) hpcray node|no job '4711'"):
            find_running_job(wanted, environ)


def test_the_only_job_is_meant_and_its_lowest_node_here_is_taken(environ: dict[str, str], job) -> None:
    job("one", node=3, nodes=4)
    lowest = job("one", node=2, nodes=4)
    assert find_running_job(None, environ) == find_running_job("auto", environ) == lowest
    (found,) = running_jobs(environ)
    assert (found.job_id, found.here, found.node.nodes, found.program) == ("one", 2, 4, "train.py --epochs 3")


def test_of_several_jobs_none_is_guessed(environ: dict[str, str], job) -> None:
    paths = {job("one"), job("two", "4711")}
    with pytest.raises(SeveralRunningJobsError, match="2 jobs of this user") as error:
        find_running_job(None, environ)
    assert {one.path for one in error.value.jobs} == paths
    text = str(error.value)
    assert "--job one" in text and "--job 4711" in text and "train.py --epochs 3" in text and "hint:" in text


def test_a_job_is_named_by_slurms_id_its_session_or_its_directory(environ: dict[str, str], job) -> None:
    one, two = job("one"), job("two", "4711")
    assert find_running_job("4711", environ) == find_running_job("two", environ) == two
    assert find_running_job(one, environ) == find_running_job(Path(one).name, environ) == one
    with pytest.raises(NoRunningJobError, match="no job 'three'.*those that run here: .*4711"):
        find_running_job("three", environ)


def test_a_job_is_named_by_its_program_or_the_beginning_of_a_name(environ: dict[str, str], job) -> None:
    path = job("abcdef0123456789", "4711")
    for wanted in ("train.py", "train", "abcd", "abcdef01234567", "trai"):
        assert find_running_job(wanted, environ) == path, wanted
    for wanted in ("abc", "tra", "4", "471", "epochs"):
        with pytest.raises(NoRunningJobError):
            find_running_job(wanted, environ)
    job("abcd000000000000", "4712")
    with pytest.raises(SeveralRunningJobsError) as error:
        find_running_job("train", environ)
    assert "--job 4711" in str(error.value) and "--job 4712" in str(error.value)
    assert find_running_job("abcde", environ) == path


NAMED = {
    "one": JobNames(("4711", "abcdef0123456789"), ("train", "train.py")),
    "two": JobNames(("4712", "abcd000000000000"), ("train", "train.py")),
    "three": JobNames(("train", "fedc000000000000"), ("4711",)),
    "four": JobNames(("47110815",), ("47110815.py",)),
}


@pytest.mark.parametrize(
    ("wanted", "meant"),
    [
        ("4711", ["one"]),  # an id comes before a name
        ("train", ["three"]),
        ("train.py", ["one", "two"]),
        ("abcd", ["one", "two"]),
        ("abcde", ["one"]),
        ("4711081", ["four"]),  # of the name; a number is never completed
        ("471108", ["four"]),
        ("fed", []),  # too short
        ("", []),
        ("nosuch", []),
    ],
)
def test_what_a_name_means(wanted: str, meant: list[str]) -> None:
    assert jobs_meant(wanted, NAMED, NAMED.__getitem__) == meant


def test_numbers_are_never_completed() -> None:
    assert jobs_meant("12345", ["123456"], lambda one: JobNames((one,))) == []


def test_the_environment_of_a_program_and_of_an_allocation_decide(environ: dict[str, str], job) -> None:
    one, two = job("one"), job("two", "4711")
    assert find_running_job(None, {**environ, ADDRESS: one}) == one
    assert find_running_job(None, {**environ, ADDRESS: one, OWN_SESSION: two}) == two, "the program's own"
    assert find_running_job(None, {**environ, "SLURM_JOB_ID": "4711"}) == two
    assert find_running_job("one", {**environ, ADDRESS: two, "SLURM_JOB_ID": "4711"}) == one, "a name comes first"
    with pytest.raises(SeveralRunningJobsError):
        find_running_job(None, {**environ, "SLURM_JOB_ID": "4712"})
