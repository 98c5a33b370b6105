"""Every example of the documentation runs as it stands; those that need Slurm in tests/slurm/test_docs_on_slurm.py."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from helpers.documents import BESIDE, CELL, DEFAULT, DRAINED, DRY, OPTIONS, Block, blocks, inline_code, pages
from helpers.jobs import ROOT, Ended, Job, embedded
from helpers.leaks import LeakCheck

from hpcray.cli import __main__ as cli

STARTED_WITHIN = 30.0  # seconds
PROGRAM = """\
import hpcray as ray

ray.init()
print(sorted({node["NodeID"] for node in ray.nodes()}))
"""
# A job with an actor, a task that waits for another one, a driver that waits in `get`, and a metric.
BUSY = """\
import json
import os
import sys
import time

import hpcray as ray
from hpcray.util.metrics import Counter

ray.init(num_cpus=3)
Counter("requests", "number of requests").inc()


@ray.remote
class Actor:
    def ready(self):
        return ray.put(b"x" * 1_000_000)


@ray.remote
def load():
    time.sleep(600)


@ray.remote
def outer(refs):
    return ray.get(refs)


actor = Actor.remote()
ref = ray.get(actor.ready.remote())
result = outer.remote([load.remote()])
time.sleep(1.5)  # the metrics are written once a second
print(json.dumps({name: text for name, text in os.environ.items() if name.startswith("HPCRAY_")}), flush=True)
ray.get(result)
"""
DRY_RUN = """\
hpcray-launch() { command hpcray-launch --dry-run "$@" | tee --append lines; }
mpirun() {  # its words are among those that hpcray-launch composes
    for word in "$@"; do grep -qF -- "${word%%:*}" lines || { echo "mpirun: $word"; return 1; }; done
}
"""

pytestmark = pytest.mark.usefixtures("leak_check")
without_mpirun = shutil.which("mpirun") is None
without_torch = importlib.util.find_spec("torch") is None


def examples(*languages: str, mode: str) -> pytest.MarkDecorator:
    found = [block for block in blocks(mode) if block.language in languages]
    assert found, f"no example of {languages} in the mode {mode!r}"
    return pytest.mark.parametrize("block", [pytest.param(block, id=str(block)) for block in found])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory of an example, with the files and directories that examples name."""
    for name in ("examples", "slurm", "benchmarks", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("program.py", "script.py", "train.py"):
        (tmp_path / name).write_text(PROGRAM)
    (tmp_path / "hosts.txt").write_text("a\nb\n")
    monkeypatch.chdir(tmp_path)
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "PRTE_ALLOW_RUN_AS_ROOT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PRTE_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    monkeypatch.setenv("HPCRAY_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    return tmp_path


def shell(script: str, environ: dict[str, str] | None = None) -> Ended:
    with Job(["bash", "-euo", "pipefail", "-c", script], environ) as job:
        ended = job.wait(100)
    assert ended.code == 0, f"{ended.code}\n{ended.out}\n{ended.err}"
    return ended


@pytest.mark.slow  # `.ci/run` runs them
@examples("python", mode=DEFAULT)
def test_a_program_runs_and_prints_what_its_comments_show(block: Block, place: Path) -> None:
    if "ray.mpi" in block.text and without_mpirun:
        pytest.skip("no mpirun")
    if "import torch" in block.text and without_torch:
        pytest.skip("no PyTorch")
    (place / "example.py").write_text(block.text)
    with Job(embedded(place / "example.py")) as job:
        ended = job.wait(100)
    assert ended.code == 0, ended.err
    printed = ended.out.splitlines()
    assert [line for line in block.output if line not in printed] == []


@pytest.mark.slow  # `.ci/run` runs them
@pytest.mark.parametrize("page", sorted({block.page for block in blocks(CELL)}))
def test_the_cells_of_a_page_are_a_program_that_prints_what_they_show(page: str, place: Path) -> None:
    cells = [block for block in blocks(CELL) if block.page == page]
    (place / "example.py").write_text("\n".join(cell.text for cell in cells))
    with Job(embedded(place / "example.py")) as job:
        ended = job.wait(100)
    assert ended.code == 0, ended.err
    printed = ended.out.splitlines()
    assert [line for cell in cells for line in cell.output if line not in printed] == []


@pytest.mark.slow  # `.ci/run` runs them
@examples("bash", "console", mode=DEFAULT)
def test_commands_run(block: Block, place: Path) -> None:
    if "mpirun" in block.text and without_mpirun:
        pytest.skip("no mpirun")
    shell(block.commands)


@examples("bash", mode=DRY)
def test_launch_lines_are_composed(block: Block, place: Path) -> None:
    if without_mpirun:
        pytest.skip("no mpirun")
    assert "-m hpcray" in shell(DRY_RUN + block.commands).out


@pytest.fixture
def busy(tmp_path: Path, own_sessions: None) -> Iterator[dict[str, str]]:
    """A job that runs meanwhile. Gives the variables that its program hands to what it starts."""
    program = tmp_path / "busy.py"
    program.write_text(BUSY)
    with Job(embedded(program), {"HPCRAY_RECORD": "1"}) as job:
        yield json.loads(job.line())
        job.send(signal.SIGINT)
        job.wait()


@pytest.mark.slow  # `.ci/run` runs them
@examples("bash", "console", mode=BESIDE)
def test_commands_inspect_a_running_job(block: Block, place: Path, busy: dict[str, str]) -> None:
    if "curl " in block.text and shutil.which("curl") is None:
        pytest.skip("no curl; hint: apt-get install curl")
    ended = shell(block.commands, busy)
    if "hpcray why" in block.text:
        assert "task outer was sent to" in ended.out and "Actor" in ended.out
    if "hpcray timeline" in block.text:
        assert (place / "timeline.json").read_text().startswith("[")
    if "hpcray metrics" in block.text:
        assert len(re.findall(r"^ray_requests_total\b", ended.out, re.MULTILINE)) == 2


@pytest.mark.slow  # `.ci/run` runs them
@examples("python", mode=DRAINED)
def test_a_program_that_drains_is_saved_and_resumes(block: Block, place: Path, leak_check: LeakCheck) -> None:
    (place / "example.py").write_text(block.text)
    environ = {"HPCRAY_DRAIN_SIGNALS": "USR1"}
    steps = []
    for _ in range(2):
        with Job(embedded(place / "example.py"), environ) as job:
            until = time.monotonic() + STARTED_WITHIN
            while "Trainer" not in _actors() and time.monotonic() < until:
                time.sleep(0.1)
            job.send(signal.SIGUSR1)
            ended = job.wait()
        assert ended.code == 75, ended.err
        states = sorted((place / "checkpoints").rglob("state.json"), key=lambda path: path.stat().st_mtime_ns)
        steps.append(int(re.sub(r"\D", "", states[-1].read_text())))
    assert 0 < steps[0] < steps[1]


def _actors() -> str:
    done = subprocess.run(["hpcray", "list", "actors", "--filter", "state=ALIVE"], capture_output=True, text=True)
    return done.stdout


def options_of(*command: str) -> str:
    return subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout


@examples("bash", mode=OPTIONS)
def test_options_of_benchmarks_exist(block: Block, place: Path) -> None:
    for line in block.commands.splitlines():
        words = shlex.split(line, comments=True)
        at = next(index for index, word in enumerate(words) if word.startswith("benchmarks/"))
        known = options_of(sys.executable, words[at])
        assert not [word for word in words[at + 1 :] if word.startswith("--") and word not in known]


@pytest.mark.slow
def test_options_in_code_spans_exist() -> None:
    """`hpcray ...`, `hpcray-launch ...`, `python -m hpcray ...` and `python benchmarks/...` in running text."""
    known: dict[tuple[str, ...], str] = {}
    checked = 0
    for page in pages():
        for span in inline_code(page):
            words = span.split()
            command = _command(words)
            if command is None:
                continue
            if command not in known:
                known[command] = options_of(*command)
            given = words[len(command if command[0] != sys.executable or "-m" in command else ["python", ""]) :]
            for word in _own_options(given, command):
                assert word in known[command], f"{page.relative_to(ROOT)}: {span}"
                checked += 1
    assert checked > 10


def _command(words: list[str]) -> tuple[str, ...] | None:
    if words[:1] == ["hpcray-launch"]:
        return ("hpcray-launch",)
    if words[:3] == ["python", "-m", "hpcray"]:
        return (sys.executable, "-m", "hpcray")
    if words[:1] == ["hpcray"] and len(words) > 2 and words[1].isalpha():
        group = getattr(cli.main.get_command(click.Context(cli.main), words[1]), "commands", {})
        return ("hpcray", *words[1 : 3 if words[2] in group else 2])
    if words[:1] == ["python"] and len(words) > 2 and words[1].startswith("benchmarks/"):
        return (sys.executable, str(ROOT / words[1]))
    return None


def _own_options(words: list[str], command: tuple[str, ...]) -> Iterator[str]:
    """The options of a command itself: those before its script."""
    for word in words:
        if word.endswith((".py", "…")) and "benchmarks" not in command[-1]:
            return
        if word.startswith("--"):
            yield word.partition("=")[0]
