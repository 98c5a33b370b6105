"""`hpcray progress` and `--progress`: how far a job is, below what its program prints, or in lines."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from engine import ROOT
from helpers.leaks import LeakCheck
from helpers.terminal import Terminal

from hpcray.cli.progress import progress_text
from hpcray.state.overview import FunctionUse, JobUse

PROGRAM = """
import sys, time
import hpcray as ray

ray.init()

@ray.remote
def work(number):
    time.sleep(0.2)
    if number % 10 == 3:
        raise ValueError(number)

print(ray.get_runtime_context().gcs_address, flush=True)
refs = [work.remote(number) for number in range(int(sys.argv[1]))]
for number in range(30):
    print("line", number, flush=True)
    if number == 15:
        sys.stdin.readline()
for ref in refs:
    try:
        ray.get(ref)
    except ValueError:
        pass
print("over", flush=True)
"""
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "HPCRAY_LOG_TO_DRIVER": "0"}

pytestmark = pytest.mark.usefixtures("leak_check")


@pytest.fixture
def program(tmp_path: Path, leak_check: LeakCheck) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def rank(program: str, count: int) -> list[str]:
    return [sys.executable, "-m", "hpcray", "--num-cpus", "2", "--progress", program, str(count)]


def test_in_a_pipe_the_last_line_has_the_whole(program: str) -> None:
    done = subprocess.run(
        rank(program, 20), env=ENVIRON, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=True
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("hpcray: ")]
    assert lines and lines[-1].endswith("18 done, 0 running, 2 failed | work 18/20, 2 failed"), done.stderr
    assert done.stdout.splitlines()[-1] == "over" and "\x1b" not in done.stderr


def test_on_a_terminal_it_is_the_bottom_line_and_the_output_scrolls_above(program: str) -> None:
    with Terminal(rank(program, 20), ENVIRON, width=90, height=12) as terminal:
        text = terminal.shows("line 15", "| work ")
        rows = text.split("\n")
        assert " done" in rows[11] and "work " in rows[11] and not any(" done" in row for row in rows[:11]), text
        terminal.press("\n")
        assert terminal.ends() == 0
        text = terminal.text
        assert "18 done, 0 running, 2 failed" in text and "line 29\nover\n" in text, text
        assert text.count(" done") == 1, "the bottom line is gone"


def test_ctrl_c_gives_the_row_back(program: str) -> None:
    with Terminal(rank(program, 1000), ENVIRON, width=90, height=12) as terminal:
        terminal.shows("line 15", "| work ")
        terminal.press("\x03")
        terminal.ends()
        assert "KeyboardInterrupt" in terminal.text and terminal.text.count(" done") == 1, terminal.text


@pytest.mark.slow
def test_from_another_terminal_it_ends_with_the_job(program: str) -> None:
    command = [sys.executable, "-m", "hpcray", "--num-cpus", "2", program, "1000"]
    with subprocess.Popen(
        command, env=ENVIRON, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as job:
        assert job.stdout is not None
        look = [sys.executable, "-m", "hpcray.cli", "progress", "--job", job.stdout.readline().strip()]
        with Terminal(look, ENVIRON, width=90, height=12) as terminal:
            terminal.shows("| work ")
            job.terminate()
            assert terminal.ends(20) == 0
            assert terminal.text.count(" done") == 1, terminal.text
        job.stdout.read()


@pytest.mark.slow
def test_what_a_launcher_forwards_to_a_terminal_is_as_on_that_terminal(program: str) -> None:
    environ = {**ENVIRON, "HPCRAY_TERMINAL": "80x10", "TERM": "xterm"}
    done = subprocess.run(
        rank(program, 4), env=environ, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=True
    )
    assert "\x1b[1;9r" in done.stderr and "\x1b[10;1H" in done.stderr and "\x1b[r" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    not (Path(sys.executable).with_name("mpirun").exists() or shutil.which("mpirun")), reason="no mpirun"
)
def test_hpcray_launch_has_it_too(program: str) -> None:
    command = [
        sys.executable,
        "-m",
        "hpcray.cli.launch",
        "-n",
        "2",
        "--cpus-per-node",
        "1",
        "--progress",
        program,
        "20",
    ]
    with Terminal(command, ENVIRON, width=90, height=12) as terminal:
        terminal.shows("line 15", "| work ")
        terminal.press("\n")
        assert terminal.ends() == 0
        assert "18 done, 0 running, 2 failed" in terminal.text, terminal.text


def test_a_line_is_cut_to_the_width_at_a_function() -> None:
    functions = [FunctionUse(f"function_{number}", running=number, ended=10, failed=1) for number in range(6)]
    use = JobUse(0.0, 0.0, [], functions, False, "", "", 3600.0)
    whole = progress_text(use, 83.0, None)
    assert whole.startswith(
        "1:23, 1:00:00 left: 54 done, 15 running, 6 failed | function_5 9/15, 1 failed | function_4"
    )
    assert progress_text(use, 83.0, 90) == whole[: whole.index(" | function_4")]
