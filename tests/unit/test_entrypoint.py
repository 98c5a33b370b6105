"""The shell command of a submitted job, and what is left of it when its supervisor is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcray.job_submission.job_supervisor import Entrypoint, JobSupervisor, _note, _tail

# The second process that an entrypoint starts is its guard.
_KILLED_BEFORE_THE_GUARD = """
import os, signal, subprocess, sys
from hpcray.job_submission.job_supervisor import Entrypoint

class Popen(subprocess.Popen):
    started = 0
    def __init__(self, *args, **options):
        Popen.started += 1
        if Popen.started == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(*args, **options)

subprocess.Popen = Popen
with open(sys.argv[1], "wb", buffering=0) as log:
    Entrypoint("echo up", log, dict(os.environ), None)
"""


def test_a_command_gives_its_output_and_exit_code(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb", buffering=0) as log:
        entrypoint = Entrypoint("""cat; echo "a  'b' $0 $#"; exit 3""", log, {"PATH": "/usr/bin:/bin"}, str(tmp_path))
    assert entrypoint.wait() == 3
    assert (tmp_path / "log").read_text() == "a  'b' /bin/sh 0\n"


def test_a_command_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb", buffering=0) as log, pytest.raises(FileNotFoundError):
        Entrypoint("true", log, {}, str(tmp_path / "nowhere"))


def test_no_command_runs_without_a_guard(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _KILLED_BEFORE_THE_GUARD, str(tmp_path / "log")], stderr=subprocess.PIPE, timeout=60
    )
    assert ended.returncode == -9, ended.stderr
    assert (tmp_path / "log").read_bytes() == b""


def test_a_job_runs_though_its_log_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The directory of logs is full, or a cleaner has removed it and something else has its name."""
    (tmp_path / "logs").write_text("no directory")
    supervisor = JobSupervisor.__new__(JobSupervisor)
    supervisor._process = SimpleNamespace(place=SimpleNamespace(session_dir=str(tmp_path)))  # type: ignore[assignment]
    supervisor._submission_id = "job_1"
    path, fd = supervisor._open_log()
    assert "job job_1: what it prints is lost: " in caplog.text
    with os.fdopen(fd, "wb", buffering=0) as log:
        assert Entrypoint("echo up; exit 3", log, {"PATH": "/usr/bin:/bin"}, None).wait() == 3
    assert _tail(path) == ""
    with open("/dev/full", "wb", buffering=0) as full:
        _note(full, "Runtime env is setting up.")
