"""The questions of docs/how-to/observe.md, answered by the commands alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from engine import PATIENCE, Marks, eventually, exceptions, hpcray_only, ray

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 2, "resources": {"licence": 1}}
WIDE = {**os.environ, "COLUMNS": "400"}


def hpcray(*args: str) -> str:
    address = ray.init(ignore_reinit_error=True)["address"]
    command = [sys.executable, "-m", "hpcray.cli", *args, "--job", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=WIDE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@ray.remote
def short():
    return 1


@ray.remote
def long():
    time.sleep(0.3)


@ray.remote(resources={"licence": 1})
def licensed(marks):
    marks.add("runs")
    time.sleep(600)


@ray.remote(num_cpus=0, max_restarts=1)
class Victim:
    def pid(self):
        print("famous last words")
        return os.getpid()


def test_which_function_eats_the_time():
    ray.get([short.remote() for _ in range(20)] + [long.remote() for _ in range(3)])
    lines = hpcray("top", "--once", "--interval", "0.2").splitlines()
    rows = [line for line in lines if re.match(r"\s*(long|short)\b", line)]
    assert "long" in rows[0] and "short" in rows[1], "the one with most time comes first"


def test_a_function_of_which_no_run_has_ended_yet_may_eat_the_time(marks: Marks):
    ref = licensed.remote(marks)
    eventually(marks.lines)

    def first() -> dict[str, object] | None:
        row = json.loads(hpcray("top", "--json", "--interval", "0.2"))["functions"][0]
        return row if row["name"] == "licensed" else None

    row = eventually(first)
    assert (row["running"], row["ended"], row["seconds"]) == (1, 0, 0.0) and float(row["elapsed"]) > 0.2, row
    ray.cancel(ref, force=True)
    eventually(lambda: ray.available_resources().get("licence"))


def test_why_is_this_task_not_running(marks: Marks):
    holder = licensed.remote(marks)
    eventually(marks.lines)
    waiting = [licensed.remote(marks) for _ in range(3)]
    for text in (hpcray("why", "licensed"), hpcray("why")):
        assert "3 PENDING_NODE_ASSIGNMENT" in text and "lacks licence: 1 wanted, 0 there" in text, text
        assert re.search(r"holds .*licence: 1.* and runs licensed", text), text
    one = waiting[0].task_id().hex()
    assert "lacks licence" in hpcray("why", one) and "lacks licence" in hpcray("why", waiting[0].hex())
    for ref in (holder, *waiting):
        ray.cancel(ref, force=True)


def test_who_holds_the_memory():
    @ray.remote(num_cpus=0)
    class Hoarder:
        def fill(self):
            self.heap = bytearray(150 << 20)
            return ray.put(b"x" * (5 << 20))

    hoarder = Hoarder.remote()
    ref = ray.get(hoarder.fill.remote())
    text = hpcray("memory")
    assert ref.hex() in text and "5.0 MiB" in text, text
    rows = text.partition("processes with most memory")[2].splitlines()
    assert any("Hoarder" in row for row in rows[2:4]), f"one of the two largest; the other is pytest:\n{text}"
    found = json.loads(hpcray("memory", "--json"))["processes"]
    assert next(row["rss"] for row in found if row["what"] == "Hoarder") > 150 << 20


def test_what_happened_to_the_actor_that_died():
    victim = Victim.options(name="trainer").remote()
    first = ray.get(victim.pid.remote())
    os.kill(first, signal.SIGKILL)
    second = eventually(lambda: _new_pid(victim, first))
    os.kill(second, signal.SIGKILL)
    with pytest.raises(exceptions.RayActorError):
        ray.get(victim.pid.remote())
    died = time.strftime("%H:%M")
    row = next(line for line in hpcray("list", "actors").splitlines() if "trainer" in line)
    assert re.search(rf"DEAD +{died}:\d\d +1 ", row) and "signal 9" in row and "node 0" in row, row
    text = hpcray("why", "trainer")
    assert f"is DEAD on node 0 since {died}:" in text and "restarted 1 times" in text and "signal 9" in text, text
    assert "hint: hpcray logs --actor" in text and hpcray("logs", "--actor", "trainer").count("famous last words") >= 2
    cause = json.loads(hpcray("list", "actors", "--detail", "--json"))
    ended = next(one for one in cause if one["name"] == "trainer")["death_cause"]["end_time_ms"]
    assert abs(ended / 1000 - time.time()) < 60


def _new_pid(victim, old: int) -> int:
    try:
        pid = ray.get(victim.pid.remote())
    except exceptions.RayActorError:
        return 0
    return pid if pid != old else 0


def test_a_name_that_nothing_has_is_an_error():
    address = ray.init(ignore_reinit_error=True)["address"]
    command = [sys.executable, "-m", "hpcray.cli", "why", "nonsense", "--job", address]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no object, task or actor 'nonsense'" in done.stderr
