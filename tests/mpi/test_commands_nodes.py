"""Each command that looks at a job, beside one on four ranks: what it prints, how fast, and on 80 columns."""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.jobs import Job, as_module
from helpers.leaks import LeakCheck
from helpers.scripts import write
from helpers.terminal import Terminal
from helpers.watched_job import LOOKS, PROGRAM, debug_by_hand, look_around, missing, tokens
from rich.text import Text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
MOST_CPU = 4.0
"""CPU seconds that a command may take: that does not depend on what else runs on the machine."""


def test_every_command_works_on_four_nodes(
    tmp_path: Path, leak_check: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCRAY_TMPDIR", str(tmp_path))
    wrong: list[str] = []
    with Job(as_module(4, write(tmp_path, PROGRAM))) as job:
        line = job.line()
        while not line.startswith("watch "):
            assert line, job.wait(60)
            line = job.line()
        ref = line.split()[1]
        address = session()
        for look in LOOKS:
            words = [
                *shlex.split(look.words.replace("REF", ref)),
                *([] if look.words == "jobs" else ["--job", address]),
            ]
            began, used = time.monotonic(), cpu_seconds()
            done = command(*words)
            took, used = time.monotonic() - began - look.extra, cpu_seconds() - used
            text = done.stdout + done.stderr
            if done.returncode != look.code or missing(look, text):
                wrong.append(f"hpcray {look.words}: {done.returncode}, lacks {missing(look, text)}:\n{text}")
            if used > MOST_CPU:
                wrong.append(f"hpcray {look.words}: {used:.1f} s of CPU time")
            print(f"{took:6.2f} s, CPU {used:.2f} s  hpcray {look.words}")
            if look.fits and not look.code:
                widest = widest_line([sys.executable, "-m", "hpcray.cli", *words])
                if len(widest) > 80:
                    wrong.append(f"hpcray {look.words}: {len(widest)} columns: {widest}")
        assert not wrong, "\n\n".join(wrong)
        hpcray = [sys.executable, "-m", "hpcray.cli"]
        with Terminal([*hpcray, "top", "--interval", "0.5", "--job", address]) as top:
            look_around(top)
        numbers = [8 if row["node"] == 0 else 7 for row in json.loads(command("debug", "--json").stdout)]
        with Terminal([*hpcray, "debug", "--job", address]) as debug:
            debug_by_hand(debug, numbers[0])
        (token,) = tokens(command("debug", "--json", "--job", address).stdout)
        with Terminal([*hpcray, "top", "--interval", "0.5", "--job", address]) as top:
            top.shows("stopping", "functions by total time")
            done = command("debug", token, "--job", address, lines="p number\nc\n")
            assert "-> return number" in done.stdout, done.stdout + done.stderr
            assert job.line() == "released [7, 8]"
            job.wait(60)
            text = top.shows("the job has ended at", "q quits")
            assert "stopping" in text, "its last figures stay"
            top.press("q")
            assert top.ends() == 0 and top.left_alternate_screen


def session() -> str:
    """A session directory of the only job in this test's place for sessions."""
    (row,) = [row for row in json.loads(command("jobs", "--json").stdout) if row["session"]]
    return str(row["session"])


def command(*words: str, lines: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command in a shell of its own."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI", "PMIX", "PRTE"))}
    line = [sys.executable, "-m", "hpcray.cli", *words]
    return subprocess.run(line, env=environ, input=lines, capture_output=True, text=True, timeout=60, check=False)


def cpu_seconds() -> float:
    """CPU time of the commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def widest_line(line: list[str]) -> str:
    """The longest line that a command prints on a terminal of 80 columns."""
    with Terminal(line) as terminal:
        terminal.ends()
        printed = terminal.printed
    return max((Text.from_ansi(one).plain for one in printed.splitlines()), key=len, default="")
