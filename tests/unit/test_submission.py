"""Submission without a cluster: options, errors, records, states."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import hpcray
from hpcray.cli.__main__ import main
from hpcray.cli.launch import parse_options
from hpcray.common.task_errors import RayTaskError, make_task_error
from hpcray.exceptions import JobError, SubmitError
from hpcray.jobs import (
    CANCELLED,
    ERROR,
    EXIT,
    LOST,
    VALUE,
    JobOutcome,
    PickledCall,
    batch_launch,
    batch_queues,
    submission,
    submitted_job,
)
from hpcray.jobs.batch_launch import BatchLaunch, sigterm_ignored
from hpcray.jobs.submission import check_request, parse_time
from hpcray.jobs.submitted_job import JobRecord, SubmittedJob, find_job, list_jobs, make_folder, states
from hpcray.platform.private_files import write_private_file
from hpcray.platform.process_control import module_line
from hpcray.platform.process_tree import ProcessIdentity
from hpcray.runtime.node.options import NodeOptions


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (90, 5400),
        (0.5, 30),
        (timedelta(hours=2), 7200),
        ("30", 1800),
        ("30:10", 1810),
        ("1:30:00", 5400),
        ("2-12", 216_000),
        ("1-02:30", 95_400),
        ("1-02:30:15", 95_415),
        (" 10 ", 600),
    ],
)
def test_time_limits_are_parsed_to_seconds(given: Any, seconds: int) -> None:
    assert parse_time(given) == seconds


@pytest.mark.parametrize("given", ["", "1h", "1:2:3:4", "-5", "0", 0, -1, True, "1.5", "infinite", "1-", timedelta(0)])
def test_bad_time_limits_are_refused_with_a_hint(given: Any) -> None:
    with pytest.raises(SubmitError, match=r"is not a time limit; hint: minutes, 'hours:minutes:seconds'"):
        parse_time(given)


def request(**given: Any) -> Any:
    names = ["gpus_per_node", "cpus_per_node", "mem", "time", "partition", "env", "sbatch"]
    return check_request(**{"name": "j", "nodes": 1, "requeue": False, **dict.fromkeys(names), **given})


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("nodes", 0, "nodes=0 is not a whole number of at least 1"),
        ("nodes", 1.5, "nodes=1.5"),
        ("gpus_per_node", -1, "gpus_per_node=-1"),
        ("cpus_per_node", True, "cpus_per_node=True"),
        ("mem", "lots", "mem: 'lots' is not a size"),
        ("env", {"A": 1}, "env: 'A': 1"),
        ("requeue", -2, "requeue=-2"),
    ],
)
def test_bad_options_of_submit_are_named(option: str, value: Any, words: str) -> None:
    with pytest.raises(SubmitError, match=words):
        request(**{option: value})


def test_the_notice_before_the_end_is_shorter_than_the_job() -> None:
    assert [request(time=minutes).notice for minutes in (0.05, 1, 60)] == [1, 20, 60]


def test_submit_refuses_what_is_neither_a_script_nor_a_function(tmp_path: Path) -> None:
    with pytest.raises(SubmitError, match="no script .*absent.py; hint"):
        hpcray.cluster.submit("absent.py")
    with pytest.raises(SubmitError, match="neither a script nor a function"):
        hpcray.cluster.submit(42)
    script = tmp_path / "s.py"
    script.touch()
    with pytest.raises(SubmitError, match=r"no keyword arguments, and submit\(\) no option \['node'\]"):
        hpcray.cluster.submit(script, node=2)
    assert not (tmp_path / ".hpcray-jobs").exists()


def test_submission_without_submitit_gives_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(SubmitError, match=r"hint: pip install 'hpcray\[slurm\]'"):
        hpcray.cluster.submit(print, executor="local", folder=tmp_path / "jobs")
    assert not (tmp_path / "jobs").exists(), "nothing is made for a job that cannot be"


def test_the_executor_is_local_without_sbatch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SubmitError, match="hint: 'auto', 'slurm', 'pbs', 'flux' or 'local'"):
        submission.choose_executor("lsf")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert submission.choose_executor("auto") == "local"
    with pytest.raises(SubmitError, match="no sbatch on PATH"):
        submission.choose_executor("slurm")


@pytest.mark.parametrize(
    ("said", "chosen"),
    [
        ("scontrol: fatal: Could not establish a configuration source", "local"),
        ("Slurmctld(primary) at ctl is DOWN", "slurm"),  # a login node of a cluster must not run jobs itself
        ("", "slurm"),
    ],
)
def test_auto_takes_slurm_where_it_is_configured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, chosen: str
) -> None:
    _program(tmp_path / "sbatch", "exit 0")
    _program(tmp_path / "scontrol", f"echo '{said}' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert submission.choose_executor("auto") == chosen


def test_the_local_executor_refuses_options_of_slurm(tmp_path: Path) -> None:
    with pytest.raises(SubmitError, match="partition needs a batch system"):
        hpcray.cluster.submit(print, executor="local", partition="gpu", folder=tmp_path)


def test_the_batch_script_has_the_options_and_no_variables_of_an_outer_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("submitit")
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for name in ("srun", "scontrol", "squeue", "sacct"):
        _program(bin_dir / name, "exit 1")
    _program(bin_dir / "sbatch", f'env > {tmp_path}/env; cp "$1" {tmp_path}/script; echo Submitted batch job 77')
    monkeypatch.setenv("PATH", f"{bin_dir}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_NTASKS", "9")  # we are inside another job
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    monkeypatch.setenv("HPCRAY_ADDRESS", "/tmp/other")
    job = hpcray.cluster.submit(
        print,
        "x",
        nodes=3,
        cpus_per_node=4,
        gpus_per_node=2,
        mem="2g",
        time="1:30:00",
        partition="fast",
        name="mine",
        folder=tmp_path / "jobs",
        requeue=True,
        sbatch={"account": "a1", "--exclusive": True},
    )
    assert (job.job_id, job.executor, job.name) == ("77", "slurm", "mine")
    lines = set((tmp_path / "script").read_text().splitlines())
    wanted = "nodes=3 ntasks-per-node=1 cpus-per-task=4 gpus-per-node=2 mem=2048M time=90 partition=fast job-name=mine"
    wanted += " account=a1 exclusive requeue no-kill signal=B:USR2@60"
    missing = {f"#SBATCH --{word}" for word in wanted.split()} - lines
    assert not missing
    assert not any("wckey" in line for line in lines)
    assert next(line for line in lines if "submitit.core._submit" in line).startswith("exec ")
    environ = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
    assert "SLURM_NTASKS" not in environ
    assert "HPCRAY_ADDRESS" not in environ
    assert environ["SLURM_CONF"] == "/etc/slurm/slurm.conf"
    assert os.environ["SLURM_NTASKS"] == "9", "our own environment is as it was"
    assert stat.S_IMODE(job.folder.stat().st_mode) == 0o700

    hpcray.cluster.submit(print, folder=tmp_path / "jobs")
    assert "--time" not in (tmp_path / "script").read_text(), "the site's default holds"
    assert "#SBATCH --no-requeue" in (tmp_path / "script").read_text()


def test_the_refusal_of_sbatch_is_in_the_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    _program(tmp_path / "srun", "exit 0")
    _program(tmp_path / "sbatch", "echo 'sbatch: error: invalid partition specified: nope' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SubmitError, match="sbatch refused the job: .*invalid partition specified: nope"):
        hpcray.cluster.submit(print, executor="slurm", partition="nope", folder=tmp_path / "jobs")
    assert list_jobs(tmp_path / "jobs") == []
    assert list((tmp_path / "jobs").iterdir()) == []


def launch(**given: Any) -> BatchLaunch:
    fixed: dict[str, Any] = {"nodes": 2, "node": NodeOptions(), "call": None}
    return BatchLaunch(**{**fixed, "slurm": False, "requeues": 0, "time": None, "env": {}, **given})


def test_a_batch_launch_composes_the_hpcray_launch_line() -> None:
    script = launch(node=NodeOptions(num_cpus=3, num_gpus=1, driver=["s.py", "a"])).line(Path("/f"))
    at = len(module_line("hpcray.cli.launch"))
    assert script[at:] == ["-n", "2", "--num-cpus", "3", "--num-gpus", "1", "s.py", "a"]
    assert parse_options(script[at:]).node == NodeOptions.from_argv(script[at + 2 :]), (
        "hpcray-launch reads the same spelling"
    )
    call = launch(call=PickledCall("f", (), b""), slurm=True).line(Path("/f"))
    assert call[at:] == ["-n", "2", "--srun", "-m", "hpcray.jobs.batch_launch", "/f"]


def test_a_job_that_may_not_start_again_has_no_checkpoint() -> None:
    assert launch().checkpoint() is None


def test_only_the_driver_itself_is_asked_for_a_checkpoint(tmp_path: Path) -> None:
    """Another process that has got its pid would die of the signal; one of another user would end the batch job."""
    run = batch_launch._BatchRun(launch(), tmp_path)
    child = subprocess.Popen(["sleep", "60"])
    found = ProcessIdentity.of(child.pid)
    assert found is not None
    driver = {"pid": child.pid, "host": socket.gethostname()}
    for started, asked in ((found.started + 1, False), (found.started, True)):
        write_private_file(str(tmp_path / batch_launch.DRIVER), json.dumps({**driver, "started": started}).encode())
        assert run._ask_driver_for_checkpoint() == asked
    assert child.wait(20) == -signal.SIGUSR2


# ---------------------------------------------------------------- records and states


def job_in(
    base: Path, job_id: str = "5", executor: str = "slurm", age: float = 1000.0, **given: Any
) -> SubmittedJob[Any]:
    folder = make_folder(base, "j")
    record = JobRecord(job_id, "j", executor, 2, time.time() - age, given.pop("limit", None), 0, ("s.py",), **given)
    record.write(folder)
    return SubmittedJob(folder, record)


def test_the_beginning_of_a_name_is_enough_if_only_one_job_has_it(tmp_path: Path) -> None:
    for number, name in ("5", "search-small"), ("6", "search-large"):
        folder = make_folder(tmp_path, name)
        JobRecord(number, name, "slurm", 2, float(number), None, 0, ("s.py",)).write(folder)
    assert find_job("search-l", tmp_path).job_id == "6"
    with pytest.raises(
        SubmitError, match=r"may be any of 2 jobs:\n  6  search-large  s\.py\n  5  .*\nhint: its whole id"
    ):
        find_job("search", tmp_path)


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_job_can_be_cancelled_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the job that has filled it."""
    job = job_in(tmp_path)
    cancelled: list[str] = []
    monkeypatch.setattr(submitted_job.batch_queues, "cancel", cancelled.append)
    monkeypatch.setattr(Path, "touch", full)
    job.cancel()
    assert cancelled == ["5"]


def test_a_job_whose_record_cannot_be_written_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would find it, and its user submits another one."""
    cancelled: list[str] = []
    monkeypatch.setattr(submitted_job.batch_queues, "cancel", cancelled.append)
    monkeypatch.setattr(submission, "_submit_to_executor", lambda *_: "77")
    monkeypatch.setattr(submission, "choose_executor", lambda _: "slurm")
    monkeypatch.setattr(JobRecord, "write", full)
    with pytest.raises(SubmitError, match=r"job 77 is cancelled, as .* does not take its record: No space left"):
        hpcray.cluster.submit(print, folder=tmp_path / "jobs")
    assert cancelled == ["77"]


def end(job: SubmittedJob[Any], outcome: JobOutcome) -> None:
    (job.folder / f"{job.job_id}_0_result.pkl").write_bytes(pickle.dumps(("success", outcome)))


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What squeue answers; there is no accounting."""
    answer: dict[str, str] = {}
    monkeypatch.setattr(batch_queues, "_queue", lambda: answer)
    monkeypatch.setattr(batch_queues, "_accounted", lambda job_ids: {})
    return answer


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (JobOutcome(VALUE, 0, pickle.dumps(7)), "COMPLETED"),
        (JobOutcome(EXIT, 0), "COMPLETED"),
        (JobOutcome(EXIT, 3), "FAILED"),
        (JobOutcome(EXIT, 143, ended_by="SIGTERM"), "CANCELLED"),
        (JobOutcome(LOST, 137), "FAILED"),
        (JobOutcome(LOST, 143, ended_by="time"), "TIMEOUT"),
    ],
)
def test_the_result_file_decides_the_state_of_a_job(
    tmp_path: Path, queue: dict[str, str], outcome: JobOutcome, state: str
) -> None:
    job = job_in(tmp_path)
    queue["5"] = "RUNNING"
    assert not job.done()
    end(job, outcome)
    assert job.done()
    assert job.state == state


def test_without_a_result_file_slurm_decides_the_state_of_a_job(tmp_path: Path, queue: dict[str, str]) -> None:
    job = job_in(tmp_path)
    for word in ("PENDING", "RUNNING", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"):
        queue["5"] = word
        assert job.state == word
        assert job.done() == (word not in ("PENDING", "RUNNING"))
    del queue["5"]
    assert job.state == "FAILED", "Slurm has forgotten it, and it left nothing"
    (job.folder / CANCELLED).touch()
    assert job.state == "CANCELLED"
    assert job_in(tmp_path, "6", age=1.0).state == "UNKNOWN", "just submitted"


def test_a_process_that_requests_a_requeue_survives_its_sigterm() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with sigterm_ignored():
        assert subprocess.run(["sh", "-c", "kill -TERM $$; kill -TERM $PPID; exit 3"], check=False).returncode == 3
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_requeued_job_that_slurm_calls_failed_is_waited_for(
    tmp_path: Path, queue: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitted_job, "_REQUEUE_TIME", 0.2)
    job = job_in(tmp_path)
    queue["5"] = "FAILED"
    asked = iter([*["FAILED"] * 2, *["PENDING"] * 10])

    def look(self: SubmittedJob[Any]) -> str:
        queue["5"] = next(asked, "")
        if not queue["5"]:
            queue["5"] = "COMPLETED"
            end(self, JobOutcome(VALUE, 0, pickle.dumps(7)))
        return batch_queues.query_state(self.job_id)

    monkeypatch.setattr(SubmittedJob, "state", property(look))
    assert job.result(timeout=30) == 7


def test_a_job_is_not_done_while_the_slurm_controller_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_queues, "_queue", lambda: None)
    job = job_in(tmp_path)
    assert job.state == "UNKNOWN"
    assert not job.done()


def test_result_returns_the_value_or_raises_the_error_of_the_job(tmp_path: Path, queue: dict[str, str]) -> None:
    job = job_in(tmp_path)
    queue["5"] = "RUNNING"
    with pytest.raises(TimeoutError, match="it goes on"):
        job.result(timeout=0.05)
    end(job, JobOutcome(VALUE, 0, pickle.dumps({"a": 1})))
    assert job.result() == {"a": 1}
    end(job, JobOutcome(EXIT, 3))
    assert job.result() == 3

    failure = make_task_error("f", LookupError("gone"), 1, "10.0.0.1")
    end(job, JobOutcome(ERROR, 1, pickle.dumps(failure)))
    with pytest.raises(LookupError, match="gone") as caught:
        job.result()
    assert isinstance(caught.value, RayTaskError)

    job.log_path("err").write_text("the last words\n")
    end(job, JobOutcome(LOST, 137))
    with pytest.raises(JobError, match=r"(?s)killed; exit code 137.*the last words.*hint: hpcray logs 5") as lost:
        job.result()
    assert lost.value.state == "FAILED"


def test_an_error_of_submitit_itself_is_a_failed_job(tmp_path: Path, queue: dict[str, str]) -> None:
    job = job_in(tmp_path)
    (job.folder / "5_0_result.pkl").write_bytes(pickle.dumps(("error", "Traceback: timed-out too many times")))
    assert job.state == "FAILED"
    with pytest.raises(JobError, match="timed-out too many times"):
        job.result()


def test_states_of_squeue_and_sacct_are_reduced_to_those_of_a_job() -> None:
    found = batch_queues._parse("1|COMPLETING\n2|CANCELLED by 1000\n3|PENDING\n4_1|TIMEOUT\n\nnonsense\n")
    assert found == {"1": "RUNNING", "2": "CANCELLED", "3": "PENDING", "4_1": "TIMEOUT"}


def test_jobs_are_found_newest_first(tmp_path: Path, queue: dict[str, str]) -> None:
    old, new = job_in(tmp_path, "5", age=100), job_in(tmp_path, "5", age=50)
    other = job_in(tmp_path, "6", age=70)
    assert [job.folder for job in list_jobs(tmp_path)] == [new.folder, other.folder, old.folder]
    assert find_job("5", tmp_path).folder == new.folder
    assert find_job("j", tmp_path).folder == new.folder
    assert find_job("s.py", tmp_path).folder == new.folder, "by its program"
    assert find_job(other.folder.name, tmp_path).folder == other.folder
    with pytest.raises(SubmitError, match=r"no job 9 in .* \(newest there: 5, 6, 5\)"):
        find_job("9", tmp_path)
    end(old, JobOutcome(EXIT, 0))
    queue["6"] = "RUNNING"
    assert [states([job])[job.folder.name] for job in (old, new, other)] == ["COMPLETED", "FAILED", "RUNNING"]


def test_a_job_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(SubmitError, match="others could plant jobs there; hint: chmod 700"):
        list_jobs(tmp_path)
    with pytest.raises(SubmitError, match="others could plant"):
        make_folder(tmp_path, "x")


# ---------------------------------------------------------------- command line


def command(*argv: str) -> Any:
    return CliRunner().invoke(main, list(argv))


def test_hpcray_jobs_lists_jobs_as_table_and_as_json(
    tmp_path: Path, queue: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCRAY_HISTORY_DIR", str(tmp_path / "history"))  # that of no other test
    assert "no jobs here" in command("jobs", "--folder", str(tmp_path)).output
    job = job_in(tmp_path)
    end(job, JobOutcome(EXIT, 0))
    assert "COMPLETED" in command("jobs", "--folder", str(tmp_path)).output
    (row,) = json.loads(command("jobs", "--folder", str(tmp_path), "--json").output)
    assert (row["job_id"], row["state"], row["nodes"], row["command"]) == ("5", "COMPLETED", 2, ["s.py"])


@pytest.mark.parametrize(
    "argv", [["logs", "9"], ["cancel", "9"], ["submit", "absent.py"], ["submit", "-t", "x", "-m", "m"]]
)
def test_commands_of_jobs_end_with_a_message_and_code_1(tmp_path: Path, argv: list[str]) -> None:
    found = command(argv[0], "--folder", str(tmp_path), *argv[1:])
    assert found.exit_code == 1
    assert found.output.startswith("Error: ")
    assert "Traceback" not in found.output


def test_import_of_hpcray_cluster_loads_nothing_of_jobs() -> None:
    code = "import sys, hpcray; hpcray.cluster; print([m for m in sys.modules if m.startswith('hpcray.jobs')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        hpcray.cluster.absent  # noqa: B018


def _program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


# ------------------------------------------------------------ --dry-run


def _without_folder(script: str, jobs: Path) -> str:
    return re.sub(rf"{re.escape(str(jobs))}/[^/\s]+", "FOLDER", script)


@pytest.mark.parametrize("executor", ["slurm", "pbs", "flux"])
def test_a_dry_run_prints_the_script_that_would_be_submitted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, executor: str
) -> None:
    pytest.importorskip("submitit")
    keep = f'touch {tmp_path}/called; echo "$0 $*" | sed "s,^[^ ]*/,," > {tmp_path}/line; '
    for name in ("srun", "squeue", "sacct", "qstat"):
        _program(tmp_path / name, "exit 1")
    _program(tmp_path / "sbatch", f'{keep}cp "$1" {tmp_path}/script; echo Submitted batch job 77')
    for name in ("qsub", "flux"):
        _program(tmp_path / name, f"{keep}cat > {tmp_path}/script; echo 77")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    program, jobs = tmp_path / "p.py", tmp_path / "jobs"
    program.write_text("")
    words = ["--folder", str(jobs), "-N", "3", "-t", "10", "-p", "fast", "-x", "A=b c", "--executor", executor]
    rest = [str(program), "--steps", "3"]
    dry = CliRunner().invoke(main, ["submit", "--dry-run", "--json", *words, *rest])
    shown = CliRunner().invoke(main, ["submit", "--dry-run", *words, *rest])
    assert (dry.exit_code, shown.exit_code) == (0, 0), dry.output
    assert not (tmp_path / "called").exists() and not jobs.exists(), "nothing is submitted or written"
    found = json.loads(dry.stdout)
    assert found["executor"] == executor and found["command"][:2] == ["env", "A=b c"]
    assert found["command"][-3:] == rest and found["command"][found["command"].index("-n") + 1] == "3"

    assert CliRunner().invoke(main, ["submit", *words, *rest]).exit_code == 0
    submitted = _without_folder((tmp_path / "script").read_text(), jobs)
    assert _without_folder(found["script"], jobs) == submitted
    assert _without_folder(shown.stdout, jobs).startswith(submitted.rstrip())
    if executor != "slurm":  # whose options are in the script
        line = _without_folder((tmp_path / "line").read_text().strip(), jobs)
        assert _without_folder(" ".join(found["submit"]), jobs) == line


def test_a_dry_run_on_this_machine_prints_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.py").write_text("")
    done = CliRunner().invoke(main, ["submit", "--dry-run", "--executor", "local", "-N", "2", "p.py", "a b"])
    words = shlex.split(done.stdout)
    assert done.exit_code == 0 and parse_options(words[words.index("hpcray.cli.launch") + 1 :]).nodes == 2
    assert words[-2:] == [str(tmp_path / "p.py"), "a b"]
    assert not (tmp_path / ".hpcray-jobs").exists()
    done = CliRunner().invoke(main, ["submit", "--dry-run", "--executor", "local", "nosuch.py"])
    assert done.exit_code == 1 and "no script" in done.output


def test_the_json_of_a_submission_says_the_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _program(tmp_path / "qsub", "cat > /dev/null; echo 77.server")
    _program(tmp_path / "qstat", "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.py").write_text("")
    done = CliRunner().invoke(main, ["submit", "--json", "--executor", "pbs", "-N", "2", "p.py"])
    found = json.loads(done.stdout)
    assert {**found, "folder": ""} == {"job_id": "77.server", "name": "p", "executor": "pbs", "nodes": 2, "folder": ""}
    assert Path(found["folder"]).parent == tmp_path / ".hpcray-jobs"
