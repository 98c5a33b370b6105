"""`hpcray logs` of a running job: the lines of its workers by function, actor and text; and log files that stay."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine import PATIENCE, eventually, hpcray_only, ray
from helpers.jobs import Job, embedded
from helpers.scripts import write

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 2}


@ray.remote
def speaks(number):
    print(f"said {number}")
    print(f"complained {number}", file=sys.stderr)
    os.system(f"echo from a child process {number}")


@ray.remote(num_cpus=0)
class Speaker:
    def speak(self, text):
        print(text)

    def begin(self, text):
        os.write(1, text.encode())


def command(*args: str) -> list[str]:
    address = ray.init(ignore_reinit_error=True)["address"]
    return [sys.executable, "-m", "hpcray.cli", "logs", "--job", address, *args]


def logs(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=PATIENCE, check=False)


def said(*args: str) -> list[str]:
    return [line.rpartition(") ")[2] for line in logs(*args).stdout.splitlines()]


def test_logs_shows_the_lines_of_workers_and_who_printed_them():
    ray.get([speaks.remote(number) for number in range(3)])
    actors = [Speaker.options(name=name).remote() for name in ("ann", "bob")]
    ray.get([actor.speak.remote(f"I am {name}") for actor, name in zip(actors, ("ann", "bob"), strict=True)])
    ray.get(actors[1].begin.remote("without an end"))

    def complete():
        shown = logs()
        counts = [shown.stdout.count(text) for text in ("said", "from a child", "I am", "without an end")]
        return shown if [*counts, shown.stderr.count("complained")] == [3, 3, 2, 1, 3] else None

    everything = eventually(complete)
    lines = everything.stdout.splitlines()
    for number in range(3):
        assert any(line.startswith("(speaks pid=") and line.endswith(f"node 0) said {number}") for line in lines)
        assert any("(speaks pid=" in line and f"from a child process {number}" in line for line in lines), lines
    of_task = logs("--task", "speaks").stdout
    assert "said 1" in of_task and "I am" not in of_task
    assert said("--actor", "ann") == ["I am ann"]
    assert logs("--actor", "Speaker").stdout.count("I am") == 2
    assert sorted(said("--grep", "said [12]")) == ["said 1", "said 2"]
    assert logs("--node", "7").stdout == ""
    wrong = logs("--grep", "(")
    assert wrong.returncode == 2 and "--grep (" in wrong.stderr


def test_logs_follows_what_is_printed_later():
    actor = Speaker.remote()
    ray.get(actor.speak.remote("before"))
    with Job([*command("--follow", "--actor", "Speaker", "--grep", "before|later")]) as job:
        assert "before" in job.line()
        ray.get(actor.speak.remote("later"))
        assert "later" in job.line()


@ray.remote(num_cpus=0)
class Ledger:
    def speak(self, count):
        for number in range(count):
            print(f"entry {number:05}")

    def crash(self):
        faulthandler.enable(sys.__stderr__)
        os.abort()


def test_logs_has_the_lines_of_rotated_files_and_what_a_dying_actor_wrote(monkeypatch: pytest.MonkeyPatch):
    ray.shutdown()
    monkeypatch.setenv("RAY_ROTATION_MAX_BYTES", "4k")
    ray.init(**INIT)
    ledger = Ledger.remote()
    ray.get(ledger.speak.remote(800))
    lines = [line for line in logs("--actor", "Ledger").stdout.splitlines() if "entry" in line]
    assert [line.rpartition(" ")[2] for line in lines] == [f"{number:05}" for number in range(800)]
    assert all(line.startswith("(Ledger pid=") for line in lines)
    with Job([*command("--follow", "--actor", "Ledger", "--grep", "entry")]) as job:
        assert "entry 00000" in job.line()
        ray.get(ledger.speak.remote(700))  # rotated several times between two looks
        followed = [job.line() for _ in range(1499)]
    assert [line.rpartition(" ")[2].strip() for line in followed[799:]] == [f"{number:05}" for number in range(700)]
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(ledger.crash.remote())
    for name in ("Ledger", ledger._actor_id.hex()[:12]):
        assert "Fatal Python error: Aborted" in eventually(lambda name=name: logs("--actor", name).stderr)
    nothing = logs("--actor", "Nobody")
    assert nothing.returncode == 0 and "no line matches; " in nothing.stderr and "1 processes" in nothing.stderr


PROGRAM = """\
import hpcray as ray

ray.init(num_cpus=1)


@ray.remote
def speak():
    print("kept for ever")


ray.get(speak.remote())
"""


def test_log_files_stay_where_log_dir_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("HPCRAY_ADDRESS", "HPCRAY_SESSION", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    with Job(embedded(write(tmp_path, PROGRAM)), {"HPCRAY_LOG_DIR": str(tmp_path / "logs-%j")}) as job:
        ended = job.wait(PATIENCE)
    assert ended.code == 0, ended.err
    directory = tmp_path / "logs-0" / "node-0"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert any("kept for ever" in path.read_text() for path in directory.glob("worker-*.out"))
