"""Jobs that have ended, in any way: what the commands say of them afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.dashboards import Dashboard
from helpers.jobs import Job, embedded, on_two_nodes
from helpers.leaks import processes_with, wait_until

from hpcray.history.block_file import FIRST_LINE, Damage, blocks, pack
from hpcray.history.job_history import JobHistory
from hpcray.history.outcome import SlurmRecord, explain, outcome
from hpcray.history.records import Began, Ended, NodeDeath, Reason, encode
from hpcray.history.runs import prune, runs

PROGRAM = """\
import glob, os, sys, time
import hpcray as ray

PLACE = os.path.abspath(sys.argv[0])

ray.init() if os.environ.get("HPCRAY_ADDRESS") else ray.init(num_cpus=2)


@ray.remote
def short(secret):
    time.sleep(0.01)
    return secret


@ray.remote
def failing():
    raise ValueError("the planted <b>message</b> 4711")


@ray.remote
def endless(place):
    open(f"{place}.{os.getpid()}", "w").close()
    time.sleep(600)


@ray.remote(num_cpus=0)
class Counter:
    def count(self):
        return 1


counter = Counter.remote()
ray.get([short.remote("argument-xyzzy") for _ in range(40)])
for _ in range(3):
    try:
        ray.get(failing.remote())
    except ValueError:
        pass
ray.get([counter.count.remote() for _ in range(5)])
how = sys.argv[1]
if how == "raise":
    raise RuntimeError("the program's own error 815")
if how == "exit":
    sys.exit(7)
if how == "kill":
    refs = [endless.remote(PLACE) for _ in range(2)]
    while len(glob.glob(f"{PLACE}.*")) < 2:
        time.sleep(0.05)
    time.sleep(3)
    print("ready", flush=True)
    ray.get(refs)
"""
MARK = "HISTORY_TEST_MARK"
SECRET = {"HPCRAY_TEST_SECRET": "variable-xyzzy"}


@pytest.fixture
def histories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of this test's histories."""
    directory = tmp_path / "histories"
    monkeypatch.setenv("HPCRAY_HISTORY_DIR", str(directory))
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    yield directory


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return written(tmp_path)


def written(directory: Path) -> Path:
    path = directory / "program.py"
    path.write_text(PROGRAM)
    return path


def hpcray(*words: str, cwd: str = "/", code: int = 0) -> str:
    """What a command prints; it has to end with this code."""
    done = subprocess.run(
        [sys.executable, "-m", "hpcray.cli", *words], capture_output=True, text=True, cwd=cwd, timeout=100
    )
    assert done.returncode == code, (words, done.stdout, done.stderr)
    return done.stdout


def run_named(histories: Path) -> str:
    """The name of the only run."""
    (path,) = histories.glob("*/*")
    return path.name


def kill_all(mark: str) -> None:
    """SIGKILL for all processes of the job at once."""
    for _ in range(2):
        for pid in processes_with(MARK, mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not processes_with(MARK, mark), "the end of all processes")


@pytest.fixture(scope="module")
def histories_of_killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place, mark = tmp_path_factory.mktemp("killed"), uuid.uuid4().hex
    environ = {**SECRET, MARK: mark, "HPCRAY_HISTORY_DIR": str(place / "histories")}
    with Job(embedded(written(place), "kill"), environ) as job:
        assert job.line() == "ready"
        kill_all(mark)
    return place / "histories"


class TestKilled:
    """All processes got SIGKILL three seconds ago."""

    @pytest.fixture
    def killed(self, histories_of_killed: Path, histories: Path) -> str:
        shutil.copytree(histories_of_killed, histories)
        return run_named(histories)

    def test_commands_answer_from_any_directory(self, killed: str, program: Path, tmp_path: Path) -> None:
        for cwd in ("/", str(tmp_path)):
            listed = hpcray("jobs", cwd=cwd)
            assert re.search(rf"{killed} +program.py +KILLED", listed)
            counts = hpcray("summary", "tasks", "--job", killed, cwd=cwd)
            assert re.search(r"short +FINISHED: 40 ", counts)
            assert re.search(r"failing +FAILED: 3 ", counts)
            assert re.search(r"endless +RUNNING: 2\b", counts)
            assert re.search(r"Counter.count +FINISHED: 5 ", counts)
            why = hpcray("why", "--job", killed, cwd=cwd)
            assert "KILLED: " in why and "killed" in why and "nothing was heard since" in why
            assert "ValueError: the planted <b>message</b> 4711 (3 times" in why
            assert "2 tasks ran when it was heard of last" in why and "endless" in why

    def test_its_program_and_the_beginning_of_a_name_name_it_too(self, killed: str) -> None:
        for name in ("program.py", "program", "prog", killed[:8]):
            assert "KILLED: " in hpcray("why", "--job", name), name
        hpcray("why", "--job", "pro", code=1)

    def test_report(self, killed: str, tmp_path: Path) -> None:
        hpcray("report", "--job", killed, str(tmp_path / "report.html"), cwd=str(tmp_path))
        page = (tmp_path / "report.html").read_text()
        for text in ("short", "failing", "endless", "Counter.count", "KILLED", "4711"):
            assert text in page
        assert "<b>message</b>" not in page and "&lt;b&gt;message&lt;/b&gt;" in page
        assert "xyzzy" not in page
        assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:|//)|@import|url\(", page)

    def test_a_report_that_does_not_fit_on_the_disk_is_said_not_to(self, killed: str) -> None:
        command = [sys.executable, "-m", "hpcray.cli", "report", "--job", killed, "/dev/full"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert "what this command writes does not fit: No space left on device" in done.stderr

    def test_no_value_of_an_argument_or_a_variable_is_kept(self, killed: str, histories: Path) -> None:
        for path in histories.rglob("*.blocks"):
            content = b"".join(blocks(path.read_bytes(), Damage()))
            assert b"xyzzy" not in content
            assert b"short" in content
            assert path.stat().st_mode & 0o777 == 0o600
            assert path.parent.stat().st_mode & 0o777 == 0o700

    def test_lists_and_timeline(self, killed: str, tmp_path: Path) -> None:
        tasks = json.loads(hpcray("list", "tasks", "--json", "--job", killed, "-f", "state=FAILED"))
        assert [row["name"] for row in tasks] == ["failing"] * 3
        assert "4711" in tasks[0]["error_message"]
        (actor,) = json.loads(hpcray("list", "actors", "--json", "--job", killed))
        assert actor["class_name"] == "Counter"
        assert actor["state"] in ("ALIVE", "DEAD"), "dead, where the raylet was killed after it"
        hpcray("timeline", str(tmp_path / "trace.json"), "--job", killed)
        assert {row["name"] for row in json.loads((tmp_path / "trace.json").read_text())} >= {"short", "endless"}
        assert f"{tasks[0]['task_id']}: failed at" in hpcray("why", tasks[0]["task_id"], "--job", killed)

    def test_the_other_commands(self, killed: str) -> None:
        assert "KILLED" in hpcray("status", "--job", killed) and "endless" in hpcray("top", "--job", killed)
        (node,) = json.loads(hpcray("memory", "--json", "--job", killed))
        assert 0 < node["most_memory"] < node["limit"]
        assert hpcray("stack", "--job", killed).count("endless") == 2
        hpcray("logs", "--job", killed, code=1)

    def test_dashboard(self, killed: str) -> None:
        pytest.importorskip("starlette")
        pytest.importorskip("uvicorn")
        with Dashboard(killed) as board:
            board.enter()
            about = board.ask("about")
            assert about["session"] == killed and about["outcome"].startswith("KILLED: ") and not about["actions"]
            overview = board.ask("overview")
            assert {row["name"]: (row["ended"], row["failed"], row["running"]) for row in overview["functions"]} == {
                "short": (40, 0, 0), "failing": (3, 3, 0), "Counter.count": (5, 0, 0), "endless": (0, 0, 2),
            }  # fmt: skip
            assert len(overview["history"]) > 10 and overview["now"]["memory_used"] > 0
            assert any("ValueError: the planted" in line for line in overview["waiting"])
            failed = board.ask("tasks", **{"is.state": "FAILED"})["rows"]
            assert len(failed) == 3 and all("4711" in row["message"] for row in failed)
            (node,) = board.ask("nodes")["rows"]
            assert node["state"] == "ended" or node["state"].startswith("silent since")  # as the raylet was killed
            assert board.ask("node", node=0)["processes"]
            assert [row["class"] for row in board.ask("actors")["rows"]] == ["Counter"]
            timeline = board.ask("timeline")
            assert {"short", "endless", "failing"} <= set(timeline["names"])
            assert sum("endless" in line for line in board.ask("stacks")["lines"]) == 2
            assert board.ask("function", name="short")["times"] and board.ask("waits")["nodes"]
            for path in ("objects", "groups", "logs/files", "logs/search", "slurm"):
                board.ask(path)
            for path in ("profile", "logs/piece?node=0&name=../../etc/passwd", "node?node=7"):
                assert board.request(f"/api/{path}", board.key)[0] == 400, path
            place = Path(board.place)
            assert place.parent.stat().st_mode & 0o777 == 0o700
        assert not place.parent.exists()

    def test_a_damaged_history_is_read_as_far_as_it_goes(self, killed: str, histories: Path) -> None:
        (path,) = histories.rglob("*.blocks")
        whole = path.read_bytes()
        for data in (whole[:-3], whole[:100], b"", b"x" * 100, whole[:50] + b"\0" * 10 + whole[60:]):
            path.write_bytes(data)
            hpcray("jobs")
            assert hpcray("why", "--job", killed)
            hpcray("summary", "tasks", "--job", killed)

    def test_removed(self, killed: str, histories: Path) -> None:
        hpcray("jobs", "rm", killed)
        assert not list(histories.iterdir())
        hpcray("jobs", "rm", killed, code=1)


OBJECT = """\
import subprocess, sys, time
import numpy as np
import hpcray as ray
from hpcray.runtime.core_worker.core_worker import need_process

ray.init(num_cpus=1)


def until(state):
    for _ in range(400):
        (store,) = need_process().diagnostics.list_stores(100, 60.0)
        if state == next((row["state"] for row in store["list"] if row["id"] == ref.hex()), None):
            time.sleep(3)  # longer than the raylet looks away
            return
        time.sleep(0.05)
    raise RuntimeError(f"it was never {state}: {store}")


ref = ray.put(np.full(8 << 20, 1, "u1"))
print(ref.hex())
until("memory")
others = [ray.put(np.full(7 << 20, number, "u1")) for number in range(8)]
until("spilled")
del others
assert ray.get(ref)[-1] == 1
until("both")
print(subprocess.run([sys.executable, "-m", "hpcray.cli", "why", ref.hex()], capture_output=True, text=True).stdout)
"""


@pytest.mark.slow
def test_the_story_of_an_object_that_was_spilled(histories: Path, tmp_path: Path) -> None:
    (tmp_path / "object.py").write_text(OBJECT)
    with Job(embedded(tmp_path / "object.py"), {"HPCRAY_OBJECT_STORE_MEMORY": str(32 << 20)}) as job:
        ended = job.wait()
        assert ended.code == 0, ended.err
    ident, live = ended.out.split("\n", 1)
    for story in (live, hpcray("why", ident, "--job", run_named(histories))):
        states = re.findall(r" node 0: ([a-z ]+)", story)
        assert [one.strip() for one in states if one.strip() != "being read back from disk"] == [
            "in memory", "on disk", "in memory and on disk",
        ], story  # fmt: skip


@pytest.mark.parametrize(
    ("how", "code", "state", "cause"),
    [
        ("end", 0, "COMPLETED", "the program ended by itself"),
        ("raise", 1, "FAILED", "the program raised an exception: RuntimeError: the program's own error 815"),
        ("exit", 7, "FAILED", "the program ended with exit code 7"),
    ],
)
def test_ends_of_programs(how: str, code: int, state: str, cause: str, histories: Path, program: Path) -> None:
    with Job([sys.executable, "-m", "hpcray", str(program), how] if how == "exit" else embedded(program, how)) as job:
        assert job.wait().code == code
    name = run_named(histories)
    assert re.search(rf"{name} +program.py +{state}", hpcray("jobs"))
    assert f"{state}: {cause}" in hpcray("why", "--job", name)
    counts = hpcray("summary", "tasks", "--job", name)
    assert re.search(r"short +FINISHED: 40 ", counts) and re.search(r"failing +FAILED: 3 ", counts)


SHORT = """\
import os, signal, sys
import hpcray as ray

ray.init() if os.environ.get("HPCRAY_ADDRESS") else ray.init(num_cpus=2)


@ray.remote
def weigh(n):
    if n == 7:
        raise ValueError("negative weight")
    return n


@ray.remote(num_cpus=0)
class Scale:
    def weigh(self, n):
        raise KeyError("no scale")


scale = Scale.remote()
refs = [*map(weigh.remote, range(10)), scale.weigh.remote(1)]
ray.wait(refs, num_returns=11)
os.kill(os.getpid(), int(sys.argv[1]))
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("launched", [False, True])
def test_a_job_shorter_than_a_look_is_whole_whatever_ends_its_program(
    launched: bool, number: signal.Signals, histories: Path, tmp_path: Path
) -> None:
    """Of workers whose owner is gone, too: they say what they have run before they are killed."""
    (tmp_path / "short.py").write_text(SHORT)
    script, word = tmp_path / "short.py", str(int(number))
    with Job([sys.executable, "-m", "hpcray", str(script), word] if launched else embedded(script, word)) as job:
        job.wait()
    (run,) = runs(str(histories))
    history = JobHistory(run)
    assert history.task_summary() == {"weigh": {"FINISHED": 9, "FAILED": 1}, "Scale.weigh": {"FAILED": 1}}
    known = {(kind, text) for kind, text, _, _ in history.errors_by_text()}
    assert known == {("ValueError", "negative weight"), ("KeyError", "'no scale'")}
    assert not history.complaints() and not history.deaths()


def test_a_report_is_written_at_the_end(histories: Path, program: Path, tmp_path: Path) -> None:
    """Of a node that a launcher starts, and of one that the program has started by `init()`, whatever the end."""
    directory, setting = tmp_path / "new" / "reports", {"HPCRAY_REPORT": str(tmp_path / "set")}
    with Job([sys.executable, "-m", "hpcray", "--report", str(directory), str(program), "exit"]) as job:
        ended = job.wait()
    name = run_named(histories)
    assert ended.code == 7 and f"hpcray: report: {directory}/{name}.html: job {name}, FAILED" in ended.err
    page = (directory / f"{name}.html").read_text()
    assert "exit code 7" in page and "the planted" in page and "argument-xyzzy" not in page
    with Job(on_two_nodes(program, "kill"), setting) as job:
        assert job.line() == "ready"
        job.send(signal.SIGTERM)
        job.wait()
    with Job(embedded(program, "end"), {**setting, "HPCRAY_HISTORY": "0"}) as job:
        assert "no report on this job is written: HPCRAY_HISTORY=0" in job.wait().err
    (written,) = (tmp_path / "set").iterdir()
    assert "SIGTERM" in written.read_text()


def test_two_nodes_and_a_signal(histories: Path, program: Path) -> None:
    with Job(on_two_nodes(program, "kill")) as job:
        assert job.line() == "ready"
        job.send(signal.SIGTERM)
        job.wait()
    name = run_named(histories)
    assert {path.name for path in histories.glob("*/*/*")} == {"node-0.0.blocks", "node-1.0.blocks"}
    why = hpcray("why", "--job", name)
    assert "SIGTERM" in why and "2 nodes" in why


def test_a_second_run_of_a_slurm_job_keeps_the_first(histories: Path, program: Path) -> None:
    slurm = {"SLURM_JOB_ID": "4242", "SLURM_ARRAY_JOB_ID": "4240", "SLURM_ARRAY_TASK_ID": "2"}
    for _ in range(2):
        with Job([*embedded(program, "end")], slurm) as job:
            job.wait()
    assert len(list(histories.glob("4240_2/*"))) == 2
    done = subprocess.run(
        [sys.executable, "-m", "hpcray.cli", "summary", "tasks", "--job", "4240_2"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "ran 2 times" in done.stderr, done.stderr


class TestWithoutAPlace:
    """The job runs as if there were no history, and says so once."""

    def test_not_writable(self, program: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with Job(embedded(program, "kill"), {"HPCRAY_HISTORY_DIR": str(tmp_path / "file" / "below")}) as job:
            assert job.line() == "ready"
            job.send(signal.SIGINT)
            ended = job.wait()
        assert ended.err.count("the history of this node is not written") == 1, ended.err

    def test_switched_off(self, histories: Path, program: Path) -> None:
        with Job(embedded(program, "end"), {"HPCRAY_HISTORY": "0"}) as job:
            assert job.wait().code == 0
        assert not histories.exists()


def test_old_histories_go(tmp_path: Path) -> None:
    now = time.time()
    for number, days in enumerate((40, 20, 10, 0)):
        directory = tmp_path / str(number) / f"{number:016x}"
        directory.mkdir(parents=True, mode=0o700)
        (directory / "node-0.0.blocks").write_bytes(b"x" * 1000)
        os.utime(directory / "node-0.0.blocks", (now - days * 86400, now - days * 86400))
    assert [run.job for run in prune(str(tmp_path), now)] == ["0"]
    assert [run.job for run in prune(str(tmp_path), now, size=1500)] == ["1", "2"]
    assert [run.job for run in runs(str(tmp_path))] == ["3"]


def test_of_many_jobs_that_begin_one_looks_for_old_histories(tmp_path: Path) -> None:
    from hpcray.history.runs import prune_if_due, runs

    def job(number: int, changed: float) -> None:
        directory = tmp_path / str(number) / f"{number:016x}"
        directory.mkdir(parents=True, mode=0o700)
        (directory / "node-0.0.blocks").write_bytes(b"x")
        os.utime(directory / "node-0.0.blocks", (changed, changed))

    now = time.time()
    for number in range(2):
        job(number, 0)
        assert [run.job for run in prune_if_due(str(tmp_path))] == [str(number)]
    for number in range(100):
        job(number, now)
    assert prune_if_due(str(tmp_path)) == []
    job(100, 0)
    assert prune_if_due(str(tmp_path)) == [] and len(runs(str(tmp_path))) == 101
    os.utime(tmp_path / "pruned", (0, 0))
    assert [run.job for run in prune_if_due(str(tmp_path))] == ["100"] and len(runs(str(tmp_path))) == 100


def written_history(place: Path, *files: list[Any]) -> JobHistory:
    """The history of a job of Slurm, 7, by the records of its nodes."""
    directory = place / "7" / ("0" * 15 + "7")
    directory.mkdir(parents=True, mode=0o700)
    for node, records in enumerate(files):
        began = Began(100.0, "7", directory.name, node, len(files), f"host{node}", 1, 1, "", "t.py", {"CPU": 1.0},
                      slurm={"SLURM_JOB_ID": "7"})  # fmt: skip
        (directory / f"node-{node}.0.blocks").write_bytes(FIRST_LINE + pack(encode([began, *records])))
    (run,) = runs(str(place))
    return JobHistory(run)


def test_a_node_that_was_lost_is_named_though_it_has_a_file(tmp_path: Path) -> None:
    history = written_history(tmp_path, [NodeDeath(101.0, 1, "its host went down"), Ended(102.0, 1)], [])
    assert history.nodes[1].lost == "its host went down" and history.nodes[1].began is not None
    lines = [text for _, text in explain(history, outcome(history))]
    assert any(text.startswith("node 1 was declared dead at") for text in lines), lines


def test_the_loss_of_the_head_is_the_cause_that_the_others_give(tmp_path: Path) -> None:
    history = written_history(tmp_path, [], [Reason(101.0, "head", "the head (node 0) died"), Ended(102.0, 1)])
    found = outcome(history)
    assert (found.state, found.cause) == ("FAILED", "the head (node 0) died")


@pytest.mark.parametrize(
    ("word", "state"), [("FAILED", "LAST_SEEN"), ("NODE_FAIL", "LAST_SEEN"), ("", "LAST_SEEN"), ("RUNNING", "RUNNING")]
)
def test_a_job_of_other_hosts_that_slurm_says_is_over_does_not_run(tmp_path: Path, word: str, state: str) -> None:
    """However lately it was heard of."""
    history = written_history(tmp_path, [], [])
    found = outcome(history, SlurmRecord(word, f"Slurm: {word}", "scontrol"), now=105.0)
    assert found.by_history == state and outcome(history, now=105.0).by_history == "RUNNING"
    assert not found.disagreement
    assert explain(history, found)[0] == (0, f"Slurm: {word}"), "also of a run after which it was requeued"
