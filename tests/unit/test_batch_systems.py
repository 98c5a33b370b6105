"""Lines for Slurm, PBS and Flux, and what is read from the answers of their commands."""

from __future__ import annotations

import time

import pytest

from hpcray.autoscaler.batch_systems import (
    BATCH_SYSTEMS,
    FLUX,
    PBS,
    SLURM,
    BatchRequest,
    BatchSystem,
    has_flux,
    has_pbs,
    is_forgotten,
)
from hpcray.common.config import Config
from hpcray.platform.allocation import ask_end_time, end_in_qstat, read_allocation
from hpcray.runtime.node.slurm_job import checkpoint_directory

FULL = BatchRequest(
    name="my job",
    nodes=3,
    cpus=4,
    gpus=2,
    mem=2 << 30,
    time=5400,
    partition="fast",
    account="a1",
    constraint="x",
    output="/o",
)


def test_slurm_gets_its_long_options() -> None:
    line = BATCH_SYSTEMS[SLURM].submit_line(FULL)
    wanted = "job-name=my job,nodes=3,ntasks-per-node=1,partition=fast,account=a1,constraint=x,time=90,cpus-per-task=4"
    wanted += ",gpus-per-node=2,mem=2048M,output=/o,no-requeue"
    assert line == ["sbatch", "--parsable", *(f"--{word}" for word in wanted.split(","))]


def test_pbs_gets_one_chunk_for_each_node() -> None:
    line = BATCH_SYSTEMS[PBS].submit_line(FULL)
    wanted = "qsub -V -S /bin/sh -N my_job -r n -l select=3:ncpus=4:ngpus=2:mem=2048mb:x -l place=scatter "
    wanted += "-l walltime=01:30:00 -q fast -A a1 -j oe -o /o"
    assert line == wanted.split()
    bare = BATCH_SYSTEMS[PBS].submit_line(BatchRequest("j", options={"W": "group_list=g", "h": True, "z": False}))
    assert " ".join(bare) == "qsub -V -S /bin/sh -N j -r n -l select=1 -l place=scatter -W group_list=g -h"


def test_flux_gets_one_slot_for_each_node() -> None:
    request = BatchRequest("j", 3, 4, 2, None, 5400, "fast", "a1", "x", "/o", {"urgency": "20", "dry-run": True})
    wanted = "flux batch --job-name=j -N 3 -n 3 --cores-per-slot=4 --gpus-per-slot=2 --time-limit=5400s --queue=fast "
    wanted += "--bank=a1 --requires=x --output=/o --error=/o --urgency=20 --dry-run"
    assert BATCH_SYSTEMS[FLUX].submit_line(request) == wanted.split()
    whole = ["flux", "batch", "--job-name=j", "-N", "2", "-n", "2", "--exclusive"]
    assert BATCH_SYSTEMS[FLUX].submit_line(BatchRequest("j", 2, gpus=1)) == whole, "with all of its GPUs"
    with pytest.raises(ValueError, match="Flux does not schedule memory; hint: "):
        BATCH_SYSTEMS[FLUX].submit_line(FULL)


@pytest.mark.parametrize(
    ("kind", "output", "job"),
    [
        (SLURM, "123\n", "123"),
        (SLURM, "123;cluster\n", "123"),
        (PBS, "123.head.example.org\n", "123.head.example.org"),
        (PBS, "qsub: waiting for the hook\n12[].head\n", "12[].head"),
        (PBS, "qsub: Job rejected", ""),
        (FLUX, "ƒ2oLkTLb1\n", "f2oLkTLb1"),
        (FLUX, "f2oLkTLb1\n", "f2oLkTLb1"),
        (FLUX, "", ""),
    ],
)
def test_the_id_of_a_job_is_read_from_the_answer(kind: str, output: str, job: str) -> None:
    assert BATCH_SYSTEMS[kind].job_id(output) == job


QSTAT = """\
Job Id: 1.head
    Job_Name = a
    job_state = Q
    Variable_List = PBS_O_HOME=/home/a,
\tjob_state = R

Job Id: 2.head
    job_state = R
    comment = Job run at ...

Job Id: 3.head
    job_state = F
    Exit_status = 0

Job Id: 4.head
    job_state = F
    Exit_status = 271

Job Id: 5.head
    job_state = F
    Exit_status = -29

Job Id: 6.head
    job_state = F
    Exit_status = 3

Job Id: 7.head
    job_state = F
    comment = Not Running: deleted before it ran

Job Id: 8.head
    job_state = H
"""


def test_the_states_of_pbs_are_those_of_slurm() -> None:
    found = BATCH_SYSTEMS[PBS].states(QSTAT)
    words = ["PENDING", "RUNNING", "COMPLETED", "CANCELLED", "TIMEOUT", "FAILED", "CANCELLED", "PENDING"]
    assert found == {f"{number}.head": word for number, word in enumerate(words, 1)}
    assert BATCH_SYSTEMS[PBS].states("") == {}


def test_the_states_of_flux_and_slurm() -> None:
    words = ["SCHED", "RUN", "CLEANUP", "COMPLETED", "CANCELED", "TIMEOUT", "FAILED", "DEPEND"]
    output = "".join(f"ƒ{number} {word}\n" for number, word in enumerate(words))
    found = list(BATCH_SYSTEMS[FLUX].states(output).values())
    assert found == ["PENDING", "RUNNING", "RUNNING", "COMPLETED", "CANCELLED", "TIMEOUT", "FAILED", "PENDING"]
    assert list(BATCH_SYSTEMS[FLUX].states(output)) == [f"f{number}" for number in range(len(words))]
    assert BATCH_SYSTEMS[SLURM].states("1|COMPLETING\n2_1|PENDING\n") == {"1": "RUNNING", "2_1": "PENDING"}


def test_every_system_names_the_jobs_that_it_queries_and_cancels() -> None:
    def lines(system: BatchSystem) -> list[str]:
        return [" ".join(system.query_line(["1", "2"])), " ".join(system.cancel_line(["1", "2"]))]

    assert lines(BATCH_SYSTEMS[SLURM])[1] == "scancel 1 2" and "--jobs=1,2" in lines(BATCH_SYSTEMS[SLURM])[0]
    assert lines(BATCH_SYSTEMS[PBS]) == ["qstat -x -f 1 2", "qdel 1 2"]
    assert lines(BATCH_SYSTEMS[FLUX]) == ["flux jobs --all --no-header --format={id} {status} 1 2", "flux cancel 1 2"]


@pytest.mark.parametrize(
    ("text", "forgotten"),
    [
        ("qdel: Unknown Job Id 12.head", True),
        ("qdel: Job has finished 12.head", True),
        ("flux-cancel: ERROR: f123: job is inactive", True),
        ("flux-jobs: ERROR: unknown jobid f1", True),
        ("qstat: cannot connect to server head (errno=111)", False),
        ("qdel: Unauthorized Request 12.head", False),
    ],
)
def test_a_forgotten_job_is_told_from_a_batch_system_that_does_not_answer(text: str, forgotten: bool) -> None:
    assert is_forgotten(text) is forgotten


def test_the_end_of_a_pbs_job_is_its_start_and_its_limit() -> None:
    text = "Job Id: 1.head\n    Resource_List.walltime = 01:00:00\n    resources_used.walltime = 00:10:00\n"
    assert end_in_qstat(text, 1000.0) == 1000 + 3600 - 600
    start = time.mktime((2026, 11, 24, 10, 0, 0, 0, 0, -1))
    assert end_in_qstat(text + "    stime = Tue Nov 24 10:00:00 2026\n", 1000.0) == start + 3600
    assert end_in_qstat("    Resource_List.ncpus = 2\n", 1000.0) is None


def test_pbs_and_flux_are_asked_for_the_end_of_the_job(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    for name, text in (("qstat", "    Resource_List.walltime = 00:01:00"), ("flux", "30")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    monkeypatch.setenv("PATH", path)
    now = time.time()
    assert ask_end_time({"PBS_JOBID": "1.head", "PATH": path}) == pytest.approx(now + 60, abs=10)
    assert ask_end_time({"FLUX_URI": "local:///x", "PATH": path}) == pytest.approx(now + 30, abs=10)
    (tmp_path / "flux").write_text("#!/bin/sh\necho 4294967295\n")
    assert ask_end_time({"FLUX_URI": "local:///x", "PATH": path}) is None, "no limit"
    assert ask_end_time({"PATH": path}) is None


def test_what_pbs_and_flux_say_of_an_allocation(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "nodes").write_text("a.cluster\nb.cluster\n")
    pbs = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBID": "9.head", "NCPUS": "32", "PBS_O_WORKDIR": "/w"}
    found = read_allocation(pbs, "b")
    assert (found.nodes, found.node, found.cpus_per_node) == (("a", "b"), 1, (32, 32))
    assert checkpoint_directory(Config(), pbs) == "/w/hpcray-checkpoints/9.head"
    rank = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4", "FLUX_JOB_NNODES": "2", "FLUX_JOB_ID": "f1"}
    found = read_allocation({"FLUX_URI": "local:///x", **rank}, "b")
    assert (found.kind, found.job, found.rank, found.ranks, found.ranks_here) == ("flux", "f1", 1, 4, 2)
    assert read_allocation({"FLUX_URI": "local:///x"}, "b").kind == "flux"


def test_a_batch_system_is_there_where_it_is_configured(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for name in ("qsub", "flux"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    here = {"PATH": str(tmp_path), "PBS_CONF_FILE": str(tmp_path / "pbs.conf")}
    assert not has_pbs(here) and not has_pbs({**here, "PATH": "/none", "PBS_JOBID": "1"})
    (tmp_path / "pbs.conf").touch()
    assert has_pbs(here)
    assert has_flux({**here, "FLUX_URI": "local:///x"}) and not has_flux({"PATH": "/none", "FLUX_URI": "local:///x"})
