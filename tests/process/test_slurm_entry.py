"""Commands that go to a job through Slurm: which job is meant, with which variables, and for how long they wait.

squeue and srun are scripts here; tests/slurm/test_commands_slurm.py has Slurm's own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine import hpcray_only

from hpcray.platform.process_control import module_line

pytestmark = hpcray_only

QUEUE = "4711|RUNNING|4|1:00:00|2026-01-01T10:00:00|n[1-4]|train"
OTHER = "4712|RUNNING|1|2:00:00|2026-01-01T11:00:00|n5|jupyter"
ADDED = "4713|RUNNING|1|2:00:00|2026-01-01T11:00:00|n6|hpcray-nodes-1a2b"
ADDED += ADDED.replace("4713", "\n4714").replace("nodes", "added")
WAITS = "4714|PENDING|1|2:00:00|2026-01-01T11:00:00||later"
# Prints what it was called with. A step that asks for a session finds one in jobs whose number is in $HAVE.
SRUN = """#!/bin/bash
case "$*" in *find_running_job*)
  for job in $HAVE; do [[ "$*" == *"--jobid=$job "* ]] && exit 0; done; exit 1;;
esac
[ -n "$HANGS" ] && exec sleep 60
while [ "$1" != sh ]; do [ "$1" == "${1#-}" ] || options="$options $1"; shift; done
echo "options$options"; env | sort | grep -E "SLURM|HPCRAY_[EAS]"
printf "\\036" >&2; echo "to standard error" >&2; shift 4
echo "command ${*:2}"; [ -n "$LASTS" ] && exec sleep 60; exit 7
"""

MODULE = " ".join(module_line("hpcray.cli.__main__")[1:])


class LoginNode:
    """A machine with Slurm's commands, and the `hpcray` command on it."""

    def __init__(self, place: Path, queue: str) -> None:
        (place / "queue").write_text(queue + "\n")
        for name, text in {"srun": SRUN, "squeue": f"#!/bin/bash\ncat {place}/queue\n"}.items():
            (place / name).write_text(text)
            (place / name).chmod(0o755)
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("SLURM", "HPCRAY", "RAY_"))}
        self.place = place  # also the working directory: `-c` would find the package of a checkout there
        self.environ = {**kept, "PATH": f"{place}:{kept['PATH']}", "HPCRAY_TMPDIR": str(place)}

    def start(self, *words: str, **environ: str) -> subprocess.Popen[str]:
        program = f"import hpcray.cli.slurm_entry as entry; entry.START_TIMEOUT = {environ.pop('LIMIT', '30.0')}\n"
        line = [sys.executable, "-c", program + "from hpcray.cli.__main__ import main; main()"]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [*line, *words], env={**self.environ, **environ}, cwd=self.place, text=True,
            stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True,
        )  # fmt: skip

    def run(self, *words: str, **environ: str) -> tuple[int, str, str]:
        with self.start(*words, **environ) as child:
            out, err = child.communicate(timeout=60)
        return child.returncode, out, err


def test_the_step_gets_the_shells_variables_but_those_of_slurm(tmp_path: Path) -> None:
    login = LoginNode(tmp_path, QUEUE)
    shell = {"SLURM_JOB_ID": "99", "SLURM_NTASKS": "64", "SLURM_MEM_PER_CPU": "1", "SRUN_DEBUG": "3", "RAY_ADDRESS": ""}
    _, out, _ = login.run("status", HPCRAY_ADDRESS="/gone", **shell)
    assert out.endswith("status --job /gone\n")  # what the variable names is not another job
    code, out, err = login.run("status", "--json", SLURM_CONF="/etc/s.conf", SLURM_EXPORT_ENV="NONE", **shell)
    assert code == 7 and out.splitlines()[-1] == f"command {MODULE} status --json"
    assert [line for line in out.splitlines() if "=" in line and not line.startswith("options")] == [
        "HPCRAY_ENTERED_JOB=4711", "SLURM_CONF=/etc/s.conf",
    ]  # fmt: skip
    assert "--jobid=4711" in out and "--export=ALL" in out and "--overlap" in out
    assert err == "hpcray: job 4711 (train, n[1-4]), through srun --overlap\nto standard error\n"


@pytest.mark.parametrize(
    ("queue", "wanted", "have", "expected"),
    [
        (f"{QUEUE}\n{ADDED}", "auto", "", "4711"),  # nodes that join a job are none of their own
        (f"{QUEUE}\n{OTHER}", "auto", "4712", "4712"),  # asked: the other one runs something else
        (f"{QUEUE}\n{OTHER}", "train", "", "4711"),
        (f"{QUEUE}\n{OTHER}", "trai", "", "4711"),
        (f"{QUEUE}\n{OTHER}\n{WAITS}", "later", "", "job 4714 (later) is PENDING: it has no node yet"),
        (f"{QUEUE}\n{OTHER}\n{WAITS}", "4714", "", "job 4714 (later) is PENDING: it has no node yet"),
        (f"{QUEUE}\n{OTHER}", "4711", "4711 4712", "4711"),
        (f"{QUEUE}\n{OTHER}", "/tmp/hpcray-0/1a2b", "4711", "4711 --job /tmp/hpcray-0/1a2b"),
        (f"{QUEUE}\n{OTHER}", "12345678", "4712", "4712 --job 12345678"),  # a session of digits
        (QUEUE, "12345678", "", "no job '12345678'"),  # a job that has ended
        (f"{QUEUE}\n{OTHER}", "auto", "", "no running hpcray node"),
        ("", "4711", "", "no job '4711'"),  # nothing runs in Slurm
        ("", "auto", "", "no running hpcray node"),
        (f"{QUEUE}\n{OTHER}", "auto", "4711 4712", "--job 4712  jupyter  n5  2:00:00 left\n  --job 4711  train"),
    ],
)
def test_which_job_is_meant(tmp_path: Path, queue: str, wanted: str, have: str, expected: str) -> None:
    code, out, err = LoginNode(tmp_path, queue).run("list", "actors", "--job", wanted, HAVE=have)
    if expected.startswith("47"):
        job, _, named = expected.partition(" ")
        assert code == 7 and f"--jobid={job} " in out, err
        assert out.splitlines()[-1] == " ".join([f"command {MODULE} list actors", *([named] if named else [])])
    else:
        assert expected in err and code == (2 if "--job" in expected else 1), err


def test_a_step_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    began = time.monotonic()
    code, _, err = LoginNode(tmp_path, QUEUE).run("status", HANGS="1", LIMIT="0.5")
    assert code == 1 and "Slurm has started no step within 0.5 s; hint: scontrol show job 4711" in err
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_step(tmp_path: Path, number: signal.Signals) -> None:
    with LoginNode(tmp_path, QUEUE).start("logs", "-f", LASTS="1") as child:
        assert child.stdout is not None
        while not child.stdout.readline().startswith("command"):
            assert child.poll() is None
        child.send_signal(number)
        assert child.wait(20) == 128 + number
