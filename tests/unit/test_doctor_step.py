"""How the doctor asks the nodes of an allocation, with imitations of srun: what gets lost on the way, who is silent."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcray.cli import site as cli
from hpcray.state import doctor_step
from hpcray.state.doctor import FAIL, OK, DoctorFinding
from hpcray.state.doctor_step import LINE, SENDING, AnswerAssembler, cut, examine_nodes

SAME = DoctorFinding("host", "CPUs", "16", OK)

# ---------------------------------------------------------------- lines


def test_a_nodes_answer_is_cut_into_lines_that_slurm_keeps_whole_and_assembled_again() -> None:
    said = {node: {"findings": [{"value": "é" * size}]} for node, size in (("n1", 1000), ("n" * 253, 300), ("n3", 1))}
    lines = [line for node, answer in said.items() for line in cut(node, answer).splitlines(keepends=True)]
    assert max(len(line.encode()) for line in lines) <= LINE
    order = random.Random(7).sample([line.split()[1] for line in lines], len(lines))
    by_node = {node: iter([line for line in lines if line.split()[1] == node]) for node in said}
    answers = AnswerAssembler()
    # A label of srun, and a profile that ended without a new line, stand before some.
    found = [answers.feed("2: welcome " + next(by_node[node]).rstrip("\n")) for node in order]
    whole = {answer["node"]: {"findings": answer["findings"]} for answer in found if "findings" in answer}
    assert whole == said
    assert {"node": "n1", "at": SENDING} in found


def test_an_answer_with_a_lost_part_is_dropped() -> None:
    first, second, *rest = cut("n1", {"findings": "x" * 3 * LINE}).splitlines()
    answers = AnswerAssembler()
    assert [answers.feed(line) for line in (first, *rest)][1:] == [{}] * len(rest)
    assert answers.feed("Welcome!") == answers.feed("HPCRAY-DOCTOR n1 1/1 [1]") == {}
    assert answers.feed("HPCRAY-DOCTOR n1 1/1 {") == {}
    assert [answers.feed(line) for line in (first, second, *rest)][-1]["findings"] == "x" * 3 * LINE


# ---------------------------------------------------------------- the step

# Three nodes on one "srun": the clock of n2 is an hour ahead, n3 never answers, and a profile prints.
NODES = """
import json, sys, time
def say(node, **what):
    print(f"HPCRAY-DOCTOR {node} 1/1 " + json.dumps(what), flush=True)
print("welcome to the cluster", flush=True)
for node in ("n1", "n2"):
    say(node, hello=True)
for line in sys.stdin:
    word, _, rest = line.strip().partition(" ")
    for node, ahead in (("n1", 0), ("n2", 3600)):
        if word == "ping":
            say(node, pong=rest, time=time.time() + ahead)
        else:
            say(node, findings=[{"topic": "host", "name": "CPUs", "value": "16", "level": "ok", "hint": ""}])
print("srun: error: n3: lost", file=sys.stderr)
"""


def test_nodes_report_findings_and_their_clocks_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_step, "_SILENCE_TIMEOUT", 3.0)
    said = examine_nodes([sys.executable, "-c", NODES], ["n1", "n2", "n3"])
    assert said.reports == {"n1": [SAME], "n2": [SAME]}
    assert said.missing == ["n3"] and said.complaint == "srun: error: n3: lost"
    assert doctor_step.judge_clocks(said.offsets).level == FAIL
    assert 3590 < said.offsets["n2"][0] - said.offsets["n1"][0] < 3610


@pytest.mark.parametrize("line", [["/nowhere/srun"], ["sh", "-c", "echo no nodes >&2; exit 1"], ["true"]])
def test_a_doctor_step_that_does_not_start_is_reported(line: list[str]) -> None:
    said = examine_nodes(line, ["n1", "n2"])
    assert said.missing == ["n1", "n2"]
    assert said.complaint


def test_the_remote_module_answers_with_findings_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    said = examine_nodes([sys.executable, "-m", "hpcray.state.doctor_step"], ["n7"])
    assert said.missing == [], said.complaint
    assert {finding.topic for finding in said.reports["n7"]} >= {"software", "host", "limits"}
    assert abs(said.offsets["n7"][0]) <= said.offsets["n7"][1] + 0.01


# A task of the step; what it finds is long.
TASK = """
from hpcray.state import doctor_step
from hpcray.state.doctor import DoctorFinding
found = [DoctorFinding("host", f"row {i}", "é" * 100, "ok") for i in range(20)]
doctor_step.examine = lambda *rest: found
doctor_step.main()
"""
# Two of them, with what Slurm does to their output: messages of 1024 bytes, with whole lines as long as they fit; and
# the worst that may happen to them: those of the two nodes come by turns.
CUTTING = """
import itertools, os, subprocess, sys
if "SLURM_UNBUFFEREDIO" in os.environ:
    sys.exit("srun would not keep any lines together")
tasks = [
    subprocess.Popen(
        [sys.executable, "-c", sys.argv[1]], stdin=-1, stdout=-1, env={**os.environ, "SLURMD_NODENAME": node}
    )
    for node in ("n1", "n2")
]

def messages(text):
    while text:
        end = text.rfind(b"\\n", 0, 1023) + 1 or 1024
        yield text[:end]
        text = text[end:]

def answers():
    said = []
    for task in tasks:
        text = b""
        while not text.endswith(b"\\n"):
            more = os.read(task.stdout.fileno(), 65536)
            if not more:
                sys.exit("a task has ended")
            text += more
        said.append(messages(text))
    for message in itertools.chain.from_iterable(itertools.zip_longest(*said, fillvalue=b"")):
        os.write(1, message)

answers()
for line in sys.stdin.buffer:
    for task in tasks:
        task.stdin.write(line)
        task.stdin.flush()
    answers()
for task in tasks:
    task.communicate()
"""


def test_long_reports_that_arrive_at_once_are_all_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_step, "_SILENCE_TIMEOUT", 10.0)
    monkeypatch.setenv("SLURM_UNBUFFEREDIO", "1")
    said = examine_nodes([sys.executable, "-c", CUTTING, TASK], ["n1", "n2"])
    assert (said.missing, said.complaint) == ([], "")
    assert [len(said.reports[node]) for node in ("n1", "n2")] == [20, 20]
    assert said.reports["n1"][7] == DoctorFinding("host", "row 7", "é" * 100, OK)


# n2 gets stuck, and does not end with its input. What srun says of n1 is none of n2's.
STUCK = """
import os, sys, time
open(sys.argv[1], "w").write(str(os.getpid()))
print('HPCRAY-DOCTOR n1 1/1 {"hello": true}', flush=True)
print('HPCRAY-DOCTOR n2 1/1 {"hello": true}', flush=True)
for line in sys.stdin:
    if line == "report\\n":
        print('HPCRAY-DOCTOR n1 1/1 {"findings": []}', flush=True)
        print('HPCRAY-DOCTOR n2 1/1 {"at": "loading MPI and UCX"}', flush=True)
print("srun: error: n1: task 0: Exited", file=sys.stderr, flush=True)
time.sleep(1000)
"""


def test_a_silent_node_is_named_with_its_last_step_and_the_srun_step_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seconds in {
        "_SILENCE_TIMEOUT": 2.0,
        "_PING_TIMEOUT": 0.2,
        "_PROGRESS_INTERVAL": 0.5,
        "_EXIT_TIMEOUT_STUCK": 0.2,
    }.items():
        monkeypatch.setattr(doctor_step, name, seconds)
    said = examine_nodes([sys.executable, "-c", STUCK, str(tmp_path / "pid")], ["n1", "n2"])
    assert said.missing == [] and said.reports["n1"] == []
    (row,) = said.reports["n2"]
    assert (row.topic, row.name, row.level) == ("nodes", "no report", FAIL)
    assert row.value == "loading MPI and UCX; no word for 2 s" and "hpcray doctor --here" in row.hint
    assert "hpcray doctor: waiting for n2: loading MPI and UCX\n" in capsys.readouterr().err
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_node_whose_task_ends_is_reported_with_sruns_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_step, "_PING_TIMEOUT", 0.2)
    script = """echo 'HPCRAY-DOCTOR n1 1/1 {"hello": true}'; sed -n /report/q
        echo 'HPCRAY-DOCTOR n1 1/1 {"at": "loading MPI and UCX"}'
        echo 'srun: warning' >&2; echo 'srun: error: n1: task 0: Bus error' >&2"""
    said = examine_nodes(["sh", "-c", script], ["n1"])
    (row,) = said.reports["n1"]
    assert row.value == "loading MPI and UCX; srun: error: n1: task 0: Bus error"


# ---------------------------------------------------------------- the command


def test_hpcray_doctor_in_an_allocation_examines_every_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text(f"#!/bin/sh\ncase \"$*\" in *true) exit 0;; esac\nexec {sys.executable} -c '{NODES}'\n")
    srun.chmod(0o755)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PMI_", "PMIX_", "OMPI_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(doctor_step, "_SILENCE_TIMEOUT", 3.0)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_CPUS_PER_NODE": "16(x3)"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor_step, "ask_end_time", lambda environ: None)
    done = CliRunner().invoke(cli.doctor)
    assert done.exit_code == 1
    assert "nodes without a report n3: srun: error: n3: lost" in done.output
    assert "n[1-2]: 16" in done.output
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "3")
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert CliRunner().invoke(cli.doctor).output == "", "of srun's tasks one asks for all"
