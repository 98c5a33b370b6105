"""The announced end of a job, on one node: callbacks, checkpoints, what is not started, exit codes, the next run."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from helpers.jobs import ROOT, Ended, Job, embedded
from helpers.leaks import LeakCheck
from helpers.scripts import BUSY, write

import hpcray as ray

EMBEDDED, MODULE = "embedded", "python -m hpcray"
BOTH = pytest.mark.parametrize("mode", [EMBEDDED, MODULE])
UNFINISHED = 75

# Counts in an actor until it is interrupted; its first argument says how the program ends then.
COUNTER = """\
import os, sys, time
import hpcray as ray


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # one write: two threads speak


@ray.on_drain
def note(seconds):
    with ray.new_checkpoint("driver") as directory:
        open(os.path.join(directory, "note"), "w").write("driver")
    say("callback", seconds > 0, "actor at", ray.get(counter.value.remote()))


@ray.remote(num_cpus=0)
class Counter:
    def __init__(self):
        self.n = 0

    def add(self):
        self.n += 1
        return self.n

    def value(self):
        return self.n

    @ray.on_drain
    def told(self, seconds):
        say("told", seconds > 0)

    def __hpcray_checkpoint__(self, directory):
        open(os.path.join(directory, "n"), "w").write(str(self.n))

    def __hpcray_restore__(self, directory):
        self.n = int(open(os.path.join(directory, "n")).read())


@ray.remote
def fine():
    return True


ray.init(num_cpus=2) if "HPCRAY_ADDRESS" not in os.environ else ray.init()
counter = Counter.options(name="count/er").remote()
begun = ray.get(counter.value.remote())
say("begun", begun, "run", ray.restart_count())
last = begun
how = sys.argv[1]
try:
    while True:
        if how == "looks" and ray.draining() is not None:
            ray.exit_unfinished()
        last = ray.get(counter.add.remote())
        if last == begun + 5:
            say("ready")
        if how == "tasks":
            ray.get(fine.remote())
        time.sleep(0.01)
finally:
    say("last", last)
"""


def run(mode: str, script: Path, checkpoints: Path, *args: str, **more: str) -> Job:
    command = embedded(script, *args)
    if mode == MODULE:
        command = [sys.executable, "-m", "hpcray", "--num-cpus", "2", str(script), *args]
    fixed = {"HPCRAY_DRAIN_SIGNALS": "USR1,TERM", "HPCRAY_CHECKPOINT_DIR": str(checkpoints)}
    return Job(command, {**fixed, **more})


def until(job: Job, word: str) -> str:
    """The next line that begins with `word`."""
    for line in iter(job.line, ""):
        if line.startswith(word):
            return line
    raise AssertionError(f"no line {word!r}: {job.wait().err}")


def number(text: str, word: str) -> int:
    found = re.search(rf"^{word} (\d+)", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1])


def interrupted(job: Job, sent: signal.Signals) -> Ended:
    until(job, "ready")
    job.send(sent)
    return job.wait()


# ---------------------------------------------------------------- signals


@BOTH
@pytest.mark.parametrize("how", ["calls", "tasks", "looks"])
def test_a_signal_saves_everything_and_the_next_run_goes_on(
    leak_check: LeakCheck, tmp_path: Path, mode: str, how: str
) -> None:
    script, kept = write(tmp_path, COUNTER), tmp_path / "kept"
    sent = signal.SIGTERM if how == "calls" else signal.SIGUSR1
    with run(mode, script, kept, how) as job:
        first = interrupted(job, sent)
    assert first.code == UNFINISHED, first.err
    assert first.out.count("callback True") == 1
    assert first.out.count("told True") == 1
    assert f"the job drains ({sent.name} on node 0)" in first.err
    saved = int((kept / "count%2Fer" / "000001" / "n").read_text())
    assert saved == number(first.out, "last"), "the checkpoint holds exactly the calls that were answered"
    assert (kept / "driver" / "000001" / "note").read_text() == "driver"
    leak_check.check()
    with run(mode, script, kept, how, SLURM_RESTART_COUNT="1") as job:
        assert until(job, "begun") == f"begun {saved} run 1"
        second = interrupted(job, sent)
    assert second.code == UNFINISHED
    assert number(second.out, "last") > saved
    leak_check.check()


@BOTH
def test_without_slurm_a_sigterm_ends_the_job_as_ever(leak_check: LeakCheck, tmp_path: Path, mode: str) -> None:
    kept = tmp_path / "kept"
    with run(mode, write(tmp_path, COUNTER), kept, "calls", HPCRAY_DRAIN_SIGNALS="auto") as job:
        ended = interrupted(job, signal.SIGTERM)
    assert abs(ended.code) & 127 == signal.SIGTERM
    assert not kept.exists()
    leak_check.check()


def test_ctrl_c_ends_a_job_that_drains(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import time, hpcray as ray\n"
        "ray.on_drain(lambda left: (print('ready', flush=True), time.sleep(600)))\n"
        "ray.init()\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n",
    )
    with run(MODULE, script, tmp_path / "kept") as job:
        until(job, "ready")
        job.send(signal.SIGUSR1)
        until(job, "ready")
        job.send(signal.SIGINT)
        assert job.wait().code in (1, 128 + signal.SIGINT)
    leak_check.check()


@BOTH
def test_a_program_that_takes_no_part_is_ended_by_sigterm_at_once(
    leak_check: LeakCheck, tmp_path: Path, mode: str
) -> None:
    with run(mode, write(tmp_path, BUSY), tmp_path / "kept", "wait", HPCRAY_DRAIN_TIMEOUT="600") as job:
        until(job, "ready")
        job.send(signal.SIGTERM)
        ended = job.wait()
    assert ended.code == (128 + signal.SIGTERM if mode == MODULE else UNFINISHED), ended.err
    leak_check.check()


@BOTH
def test_when_the_time_is_up_the_job_ends_whatever_it_does(leak_check: LeakCheck, tmp_path: Path, mode: str) -> None:
    script = write(
        tmp_path,
        "import time, hpcray as ray\n"
        "@ray.remote\n"
        "class Busy:\n"
        "    def work(self):\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(600)\n"
        "    def __hpcray_checkpoint__(self, directory):\n"
        "        pass\n"
        "ray.init()\n"
        "busy = Busy.options(name='busy').remote()\n"
        "ray.get(busy.work.remote())\n",
    )
    with run(mode, script, tmp_path / "kept", HPCRAY_DRAIN_TIMEOUT="2") as job:
        until(job, "(")
        job.send(signal.SIGTERM)
        ended = job.wait()
    assert ended.code == UNFINISHED, ended.err
    assert "no checkpoint of actor Busy 'busy': it was busy until the time was up" in ended.err
    assert "the time is up and the program still runs" in ended.err
    leak_check.check()


CALLS_IN_A_DRAIN = """\
import os, sys, time
import hpcray as ray


@ray.remote
class Holder:
    def __init__(self, how, writing):
        self.how, self.writing = how, writing

    def __hpcray_checkpoint__(self, directory):
        if self.how == "slow":
            open(self.writing, "w").close()
            while os.path.exists(self.writing):
                time.sleep(0.01)
        if self.how == "fails":
            raise ValueError("as the test wants it")


ray.init()
how, writing = sys.argv[1:]
holder = Holder.options(name=None if how == "nameless" else "holder").remote(how, writing)
ray.get(holder.__ray_ready__.remote())
ray.drain("the test wants it")
while ray.draining() is None or (how == "slow" and not os.path.exists(writing)):
    time.sleep(0.01)
waits = holder.__ray_ready__.remote()
if how == "slow":
    print(len(ray.wait([waits], timeout=0.5)[0]), "answered", flush=True)
    os.unlink(writing)
try:
    ray.get(waits)
    while True:
        ray.get(holder.__ray_ready__.remote())
except ray.exceptions.JobDrainingError as error:
    print(error, flush=True)
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("written", "and the actor's checkpoint is written; hint: end the program, the next run goes on from there"),
        ("slow", "and the actor's checkpoint is written; hint: "),
        ("fails", "and the actor has no new checkpoint: ValueError: as the test wants it; hint: "),
        ("nameless", "and the actor has no new checkpoint: it has no name, so no later run could find it; hint: "),
    ],
)
def test_a_call_in_a_drain_is_told_whether_there_is_a_checkpoint(
    leak_check: LeakCheck, tmp_path: Path, how: str, said: str
) -> None:
    with run(EMBEDDED, write(tmp_path, CALLS_IN_A_DRAIN), tmp_path / "kept", how, str(tmp_path / "writing")) as job:
        ended = job.wait()
    assert ended.code == 0, ended.err
    assert f"the job drains (the test wants it) {said}" in ended.out, ended.out
    assert ended.out.count("hint: ") == 1
    assert how != "slow" or "0 answered" in ended.out, "it is told only when it is true"
    leak_check.check()


@pytest.mark.parametrize(
    ("name", "root", "why"), [("", "kept", "it has no name"), ("named", "", "no checkpoint directory is known")]
)
def test_what_cannot_be_saved_is_told(leak_check: LeakCheck, tmp_path: Path, name: str, root: str, why: str) -> None:
    script = write(
        tmp_path,
        "import sys, time, hpcray as ray\n"
        "@ray.remote\n"
        "class Holder:\n"
        "    def __hpcray_checkpoint__(self, directory):\n"
        "        pass\n"
        "ray.init()\n"
        "holder = Holder.options(name=sys.argv[1] or None).remote()\n"
        "ray.get(holder.__ray_ready__.remote())\n"
        "ray.drain('the test wants it')\n"
        "while ray.draining() is None: time.sleep(0.01)\n",
    )
    checkpoints = {"HPCRAY_CHECKPOINT_DIR": str(tmp_path / root) if root else ""}
    with run(MODULE, script, tmp_path, name, **checkpoints) as job:
        ended = job.wait()
    assert ended.code == 0, ended.err
    assert re.search(rf"no checkpoint of Holder .*{why}.*hint: ", ended.err), ended.err
    leak_check.check()


def test_a_failing_checkpoint_keeps_the_one_before(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import hpcray as ray\n"
        "@ray.remote\n"
        "class Holder:\n"
        "    async def __hpcray_checkpoint__(self, directory):\n"
        "        open(directory + '/half', 'w').write('half')\n"
        "        raise ValueError('as the test wants it')\n"
        "ray.init()\n"
        "holder = Holder.options(name='holder').remote()\n"
        "ray.get(holder.__ray_ready__.remote())\n"
        "with ray.new_checkpoint('holder') as directory:\n"
        "    pass\n"
        "ray.drain('the test wants it')\n"
        "while True: ray.get(holder.__ray_ready__.remote())\n",
    )
    with run(EMBEDDED, script, tmp_path / "kept") as job:
        ended = job.wait()
    assert ended.code == UNFINISHED
    assert "no checkpoint of Holder 'holder': ValueError: as the test wants it" in ended.err
    assert os.listdir(tmp_path / "kept" / "holder") == ["000001"]
    leak_check.check()


LAST_CALLS = """\
import asyncio, sys, time
import hpcray as ray


class Sum:
    def __init__(self):
        self.n = 0

    def __hpcray_checkpoint__(self, directory):
        open(directory + "/n", "w").write(str(self.n))


@ray.remote
class Async(Sum):
    async def add(self):
        await asyncio.sleep(1)
        self.n += 1
        return self.n


@ray.remote(max_concurrency=2)
class Threaded(Sum):
    def add(self):
        time.sleep(1)
        self.n += 1
        return self.n


ray.init(num_cpus=2)
actors = [Async.options(name="async").remote(), Threaded.options(name="threaded").remote()]
ray.get([actor.__ray_ready__.remote() for actor in actors])
refs = [actor.add.remote() for actor in actors]
time.sleep(0.3)
ray.drain("the test wants it")
while ray.draining() is None:
    time.sleep(0.01)
print("answers", *ray.get(refs), flush=True)
if sys.argv[1] == "gone":
    del actors, refs
"""


@pytest.mark.parametrize("how", ["held", "gone"])
def test_calls_that_have_begun_are_in_the_checkpoint(leak_check: LeakCheck, tmp_path: Path, how: str) -> None:
    with run(EMBEDDED, write(tmp_path, LAST_CALLS), tmp_path / "kept", how) as job:
        ended = job.wait()
    assert (ended.code, ended.out) == (0, "answers 1 1\n"), ended.err
    for name in ("async", "threaded"):
        assert (tmp_path / "kept" / name / "000001" / "n").read_text() == "1"
    assert "actors: 2" in ended.err
    leak_check.check()


# ---------------------------------------------------------------- the known end


@pytest.mark.slow
def test_near_its_end_a_job_drains_by_itself(leak_check: LeakCheck, tmp_path: Path) -> None:
    # The last quarter of this time is for the drain.
    end = time.time() + 16
    with run(MODULE, write(tmp_path, COUNTER), tmp_path / "kept", "calls", HPCRAY_END_TIME=str(end)) as job:
        ended = job.wait()
    assert ended.code == UNFINISHED, ended.err
    assert "the job drains (the end of the job's time limit)" in ended.err
    leak_check.check()


IN_TIME = """\
import os, time
import hpcray as ray


@ray.remote
def left():
    return ray.time_left()


@ray.remote
class Asks:
    def left(self):
        return ray.time_left()


ray.init(num_cpus=1)
found = [ray.time_left(), ray.get(left.remote()), ray.get(Asks.remote().left.remote())]
print("left", all(900 < seconds <= 1000 for seconds in found))
print("short", ray.get(left.options(max_runtime=5).remote()) > 900)
for what in (left.options(max_runtime=2000).remote(), Asks.options(max_runtime=2000).remote().left.remote()):
    try:
        ray.get(what)
    except ray.exceptions.NotEnoughTimeError as error:
        print(type(error).__name__, error.needed, 800 < error.left < 1000, "hint: " in str(error))
"""


def test_the_time_left_is_known_everywhere_and_work_that_is_too_long_is_not_started(
    leak_check: LeakCheck, tmp_path: Path
) -> None:
    with run(EMBEDDED, write(tmp_path, IN_TIME), tmp_path, HPCRAY_END_TIME=str(time.time() + 1000)) as job:
        ended = job.wait()
    assert ended.code == 0, ended.err
    refused = "NotEnoughTimeError 2000.0 True True\n"
    assert ended.out == f"left True\nshort True\n{refused}{refused}"
    leak_check.check()


def test_what_waits_until_it_is_too_late_is_not_started(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import time, hpcray as ray\n"
        "@ray.remote\n"
        "def work(seconds): time.sleep(seconds)\n"
        "ray.init(num_cpus=1)\n"
        "blocker = work.remote(600)\n"
        "limit = ray.time_left() - 100 - 2\n"  # there is time enough for two seconds more
        "late = work.options(max_runtime=limit)\n"
        "try: ray.get([late.remote(0) for _ in range(3)])\n"
        "except ray.exceptions.NotEnoughTimeError as error: print(error.needed == limit, error.left < limit)\n",
    )
    environ = {"HPCRAY_END_TIME": str(time.time() + 1000), "HPCRAY_DRAIN_MARGIN": "100"}
    with run(EMBEDDED, script, tmp_path, **environ) as job:
        ended = job.wait()
    assert (ended.code, ended.out) == (0, "True True\n"), ended.err
    leak_check.check()


# ---------------------------------------------------------------- in one process


def test_without_a_limit_there_is_no_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert ray.time_left() is None
    monkeypatch.setenv("HPCRAY_END_TIME", str(time.time() + 100))
    left = ray.time_left()
    assert left is not None
    assert 90 < left <= 100
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    assert ray.restart_count() == 3
    assert ray.draining() is None


def test_outside_a_job_there_is_no_checkpoint_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for call in (ray.checkpoint_dir, lambda: ray.latest_checkpoint("x"), lambda: ray.new_checkpoint("x")):
        with pytest.raises(RuntimeError, match="hint: set HPCRAY_CHECKPOINT_DIR"):
            call()


def test_wrong_use_is_refused() -> None:
    async def later(seconds: float) -> None: ...

    for wrong in (3, later):
        with pytest.raises(TypeError, match="on_drain takes"):
            ray.on_drain(wrong)
    for seconds in (0, -1):
        with pytest.raises(ValueError, match="not a positive time"):
            ray.drain(seconds=seconds)
    for limit in (0, -5, True, float("nan")):
        with pytest.raises(ValueError, match="max_runtime"):
            ray.remote(max_runtime=limit)(lambda: None)


# ---------------------------------------------------------------- the example


@pytest.mark.slow
def test_training_that_was_interrupted_ends_with_the_same_weights(leak_check: LeakCheck, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    example = ROOT / "examples" / "train_preemptible.py"
    with run(EMBEDDED, example, tmp_path / "one", "--steps", "40") as job:
        undisturbed = job.wait()
    assert undisturbed.code == 0, undisturbed.err
    with run(EMBEDDED, example, tmp_path / "two", "--steps", "40", "--pause", "0.1") as job:
        until(job, "step 10")
        job.send(signal.SIGUSR1)
        first = job.wait()
    assert first.code == UNFINISHED, first.err
    with run(MODULE, example, tmp_path / "two", "--steps", "40", SLURM_RESTART_COUNT="1") as job:
        second = job.wait()
    assert second.code == 0, second.err
    resumed = re.search(r"run 1 of the job begins at step (\d+) of 40", second.out)
    assert resumed is not None, second.out
    assert 10 <= int(resumed[1]) < 40
    weights = re.search(r"weights: \w{16}", undisturbed.out)
    assert weights is not None
    assert weights[0] in second.out
    leak_check.check()
