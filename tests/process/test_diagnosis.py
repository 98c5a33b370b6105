"""`hpcray stack`, `hpcray why` and the report of a get that waits for long: who does what, and who waits for whom."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from engine import PATIENCE, ROOT, Marks, eventually, hpcray_only, ray

from hpcray.cli.observe import stack as stack_command
from hpcray.cli.observe import why as why_command
from hpcray.diagnostics.cluster_query import ClusterQuery, stacks
from hpcray.diagnostics.wait_graph import WaitGraph, show_lines
from hpcray.runtime.core_worker.core_worker import need_process

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 2, "get_report_after": 0.4}


@ray.remote
def sleeper(marks):
    marks.add(str(os.getpid()))
    time.sleep(600)


@ray.remote
def echo(value):
    return value


@ray.remote
def outer(refs):
    return ray.get(refs)


@ray.remote(num_cpus=0)
class Async:
    async def _inner(self):
        await asyncio.sleep(600)

    async def call(self):
        await self._inner()


@ray.remote(num_cpus=0)
class Threaded:
    def __init__(self, seconds=0.0):
        time.sleep(seconds)

    def wait(self, marks):
        marks.add(str(os.getpid()))
        time.sleep(600)


def look(patience: float = PATIENCE) -> dict[int, dict]:
    """Every process by its pid."""
    return {one["pid"]: one for node in stacks(ClusterQuery(need_process(), patience)) for one in node["processes"]}


def why(ref) -> str:
    return "\n".join(show_lines(WaitGraph(need_process()).explain(ref.binary())))


def running(refs, marks, count=1) -> list[int]:
    """Pids of those that run."""
    eventually(lambda: len(marks.lines()) >= count)
    return [int(pid) for pid in marks.lines()]


def test_stack_shows_all_threads_of_all_processes_with_their_tasks(marks: Marks):
    task = sleeper.remote(marks)
    actor = Threaded.options(max_concurrency=3).remote()
    calls = [actor.wait.remote(marks) for _ in range(2)]
    pids = running([task, *calls], marks, 3)
    found = look()
    assert not any(one["problem"] for one in found.values())
    assert {one["kind"] for one in found.values()} == {"raylet", "driver", "worker"}
    (own,) = [one for one in found.values() if one["kind"] == "driver"]
    own_test = test_stack_shows_all_threads_of_all_processes_with_their_tasks.__name__
    assert any(frame[2].endswith(own_test) for frame in frames(own))
    names = sorted(call["name"] for pid in set(pids) for call in found[pid]["calls"])
    assert names == ["Threaded.wait", "Threaded.wait", "sleeper"]
    for pid in set(pids):
        threads = {thread["ident"]: thread for thread in found[pid]["threads"]}
        for call in found[pid]["calls"]:
            assert threads[call["thread"]]["frames"][-1][0] == __file__
            assert 0 <= call["seconds"] < PATIENCE
    ray.cancel(task)
    ray.kill(actor)


def frames(one):
    return [frame for thread in one["threads"] for frame in thread["frames"]]


def test_stack_shows_coroutines_down_to_their_innermost_await():
    actor = Async.remote()
    calls = [actor.call.remote() for _ in range(3)]

    def pending():
        rows = [row for one in look().values() if one["actor"] == "Async" for row in one["coroutines"]]
        return [row for row in rows if row["name"] == "call" and len(row["frames"]) >= 4]

    rows = eventually(lambda: rows if len(rows := pending()) == 3 else None)
    assert {row["task"] for row in rows} == {call.hex()[:26] for call in calls}
    for row in rows:
        assert [frame[2].rpartition(".")[2] for frame in row["frames"]][-3:] == ["call", "_inner", "sleep"]
    (host,) = [one for one in look().values() if one["actor"] == "Async"]
    assert [call["name"] for call in host["calls"]] == ["Async.call"] * 3
    assert "runs Async.call for" in why(calls[0]) and "in Async._inner" in why(calls[0])
    ray.kill(actor)


def test_a_process_that_does_not_answer_is_described_by_the_kernel(marks: Marks):
    ref = sleeper.remote(marks)
    (pid,) = running([ref], marks)
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        one = look(0.5)[pid]
        assert one["problem"] == "no answer within 0.5 s" and one["threads"] == []
        assert one["kernel"]["state"] == "stopped by a signal"
        text = "\n".join(show_lines(WaitGraph(need_process(), 0.5).explain(ref.binary())))
        assert re.search(rf"pid {pid}\) does not answer within 0.5 s; the kernel says: stopped by a signal", text)
    finally:
        os.kill(pid, signal.SIGCONT)
        ray.cancel(ref)


def test_why_leads_to_the_process_or_the_resource(marks: Marks):
    first, second = sleeper.remote(marks), sleeper.remote(marks)
    running([first, second], marks, 2)
    dependent = echo.remote(first)
    queued = echo.remote(1)
    never = echo.options(resources={"nowhere": 1}).remote(1)
    slow = Threaded.remote(600)
    call = slow.wait.remote(marks)
    text = why(dependent)
    assert "task echo waits for its arguments" in text
    assert re.search(rf"  {first.hex()} .*task sleeper was sent to", text)
    assert re.search(
        r"    process 0\.\d+ \(worker, pid \d+\) runs sleeper for [\d.]+ s, at .*test_diagnosis.py:\d+ in", text
    )
    text = why(queued)
    assert "task echo waits for a worker with {'CPU': 1.0}" in text
    assert "node 0 lacks CPU: 1 wanted, 0 there" in text
    assert len(re.findall(r"holds CPU: 1 and runs sleeper for", text)) == 2
    assert "node 0 can never serve it: nowhere: 1 wanted, 0 there" in why(never)
    eventually(lambda: "runs Threaded.__init__ for" in why(call))
    assert "actor Threaded is PENDING on node 0" in why(call)
    ready = ray.put(1)
    assert why(ready).endswith("object is ready")
    gone = ray.put(2)
    ident = gone.binary()
    del gone
    eventually(lambda: "it was freed" in WaitGraph(need_process()).explain(ident)[0].text)
    for ref in (first, second, dependent, queued, never):
        ray.cancel(ref)
    ray.kill(slow)


def test_why_goes_through_tasks_that_wait(marks: Marks):
    work = sleeper.remote(marks)
    running([work], marks)
    top = outer.remote([work])
    eventually(lambda: "it waits in get for one object" in why(top))
    assert re.search(rf"runs outer .*\n.*waits in get for one object\n +{work.hex()} .*\n.* runs sleeper", why(top))
    ray.cancel(work)


def test_why_ends_where_actors_wait_for_each_other():
    @ray.remote(num_cpus=0, max_concurrency=2)
    class Waiter:
        def __init__(self):
            self.there = threading.Event()

        def take(self, box):
            self.ref = box[0]
            self.there.set()

        def wait(self):
            self.there.wait()
            return ray.get(self.ref)

    one, two = Waiter.remote(), Waiter.remote()
    first, second = one.wait.remote(), two.wait.remote()
    ray.get([one.take.remote([second]), two.take.remote([first])])
    text = eventually(lambda: text if "see above" in (text := why(first)) else None)
    assert text.count("runs Waiter.wait for") == 2 and text.splitlines()[-1].strip() == f"{first.hex()}: see above"
    ray.kill(one)
    ray.kill(two)


def test_a_driver_that_waits_long_reports_the_reason_once_and_again_later(marks: Marks, capfd):
    ref = sleeper.remote(marks)
    running([ref], marks)
    with pytest.raises(ray.exceptions.GetTimeoutError):
        ray.get(ref, timeout=1.5)
    found = eventually(lambda: (text := capfd.readouterr().err) and "a get has waited" in text and text)
    assert re.search(r"hpcray: a get has waited \d+ s|a while for 1 object:", found)
    assert ref.hex() in found and "runs sleeper for" in found
    assert 1 <= found.count("a get has waited") <= 3, "the pause doubles"
    ray.cancel(ref)


def test_sigusr2_reports_at_once_and_the_program_goes_on(marks: Marks, capfd):
    ref = sleeper.remote(marks)
    running([ref], marks)
    text = ""
    os.kill(os.getpid(), signal.SIGUSR2)

    def told():
        nonlocal text
        text += capfd.readouterr().err
        return "no get and no wait waits in this process" in text

    eventually(told)
    ray.cancel(ref)


def run(*args: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ.pop("HPCRAY_ADDRESS", None)
    return subprocess.run(
        [sys.executable, "-m", "hpcray.cli", *args, "--address", need_process().place.session_dir],
        env=environ, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip


def test_stack_and_why_work_from_a_second_terminal(marks: Marks):
    ref = sleeper.remote(marks)
    (pid,) = running([ref], marks)
    shown = run("stack")
    assert shown.returncode == 0, shown.stderr
    assert f"(worker, pid {pid}, busy)" in shown.stdout and "'MainThread' runs sleeper for" in shown.stdout
    assert "time.sleep(600)" in shown.stdout and "template.py" not in shown.stdout
    assert "attached" not in shown.stdout, "who looks is no part of the job"
    rows = json.loads(CliRunner().invoke(stack_command, ["--json"]).output)
    assert pid in [one["pid"] for one in rows[0]["processes"]]
    assert "runs sleeper for" in run("why", ref.hex()).stdout
    assert "no object, task or actor 'zz'" in CliRunner().invoke(why_command, ["zz"]).output
    ray.cancel(ref)


def test_a_task_whose_workers_die_waits_before_it_runs_again():
    @ray.remote(max_retries=-1, num_cpus=0)
    def die():
        os._exit(1)

    ref = die.remote()
    eventually(lambda: re.search(r"task die has lost \d+ workers, and runs again in", why(ref)))
    ray.cancel(ref)


def test_stack_shows_a_process_in_c_code_that_holds_the_gil(marks: Marks):
    @ray.remote
    def stuck(marks):
        marks.add(str(os.getpid()))
        libc = ctypes.PyDLL(None)  # its functions run with the lock held
        for _ in range(600):
            libc.sleep(1)

    ref = stuck.options(max_retries=0).remote(marks)
    (pid,) = running([ref], marks)
    one = eventually(lambda: one if (one := look(0.5)[pid])["problem"] else None)
    assert "in stuck" in one["kernel"]["stacks"] and "test_diagnosis.py" in one["kernel"]["stacks"]
    assert one["kernel"]["state"] == "sleeping"
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(ref)
