"""The head's raylet is killed under `hpcray-launch --driver-rank`: another one takes its place, and the job goes on."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from helpers.jobs import Job
from helpers.leaks import LeakCheck, wait_until

from hpcray.platform.launcher_environment import open_mpi_wheel_prefix
from hpcray.platform.session_directory import live_sessions

pytestmark = [
    pytest.mark.usefixtures("both_ways"),
    pytest.mark.skipif(not open_mpi_wheel_prefix(), reason="no Open MPI from PyPI"),
    pytest.mark.timeout(180),
]

# Says "ready", waits for the death of the head's node, and tells what became of everything.
STORY = """\
import sys, time
import hpcray as ray
from hpcray.experimental import internal_kv as kv
from hpcray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
from hpcray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as In

ray.init(namespace="here")
ids = [node["NodeID"] for node in ray.nodes()]


def on(node, soft=False):
    return On(ids[node], soft)


@ray.remote(num_cpus=0)
class Counter:
    def __init__(self, start):
        self.count = start

    def more(self):
        self.count += 1
        return self.count

    def node(self):
        return ids.index(ray.get_runtime_context().get_node_id())


@ray.remote
def where(seconds=0.0):
    time.sleep(seconds)
    return ids.index(ray.get_runtime_context().get_node_id())


stays = Counter.options(name="stays", scheduling_strategy=on(2)).remote(10)
detached = Counter.options(name="detached", lifetime="detached", scheduling_strategy=on(1)).remote(20)
moves = Counter.options(
    name="moves", scheduling_strategy=on(0, True), max_restarts=1, max_task_retries=1
).remote(30)
dies = Counter.options(name="dies", scheduling_strategy=on(0, True)).remote(40)
assert ray.get([counter.more.remote() for counter in (stays, detached, moves, dies)]) == [11, 21, 31, 41]
group = placement_group([{{"CPU": 1}}] * 3, strategy="SPREAD", name="group")
ray.get(group.ready())
kv._internal_kv_put(b"key", b"value")
running = [where.options(num_cpus=0, scheduling_strategy=on(node, True)).remote(3.0) for node in (0, 2)]
ray.get(where.options(num_cpus=0, scheduling_strategy=on(0)).remote())
print("ready", flush=True)

{wait}

print("stays", ray.get(stays.more.remote()), ray.get(ray.get_actor("stays").more.remote()), flush=True)
print("detached", ray.get(ray.get_actor("detached").more.remote()), flush=True)
print("moves", ray.get(moves.more.remote()), ray.get(moves.node.remote()) != 0, flush=True)
try:
    print("dies", ray.get(dies.more.remote()), flush=True)
except ray.exceptions.ActorDiedError as error:
    print("dies", "node 0 died" in str(error), flush=True)
print("running", [node != 0 for node in ray.get(running)], flush=True)
print("spread", sorted(set(ray.get([where.options(scheduling_strategy="SPREAD").remote(0.2) for _ in range(12)]))))
new = Counter.options(name="new").remote(50)
print("new", ray.get(ray.get_actor("new").more.remote()), flush=True)
print("value", kv._internal_kv_get(b"key"), kv._internal_kv_exists(b"none"), flush=True)
small = placement_group([{{"CPU": 1}}], name="small")
ray.get(small.ready(), timeout=30)
inside = where.options(scheduling_strategy=In(small)).remote()
print("small", ray.get(inside) != 0, flush=True)
remove_placement_group(small)
print("again", ray.get(get_placement_group("group").ready(), timeout=30) is not None, flush=True)
remove_placement_group(group)
ray.kill(stays)
try:
    while True:  # kill() does not wait for the end
        ray.get(stays.more.remote())
except ray.exceptions.ActorDiedError:
    print("killed", flush=True)
print("dead", [row["Alive"] for row in ray.nodes()], flush=True)
sys.exit(7)
"""

NOTICED = """\
began = time.monotonic()
while all(row["Alive"] for row in ray.nodes()):
    assert time.monotonic() < began + 60
    time.sleep(0.05)
"""

TOLD = [
    "stays 12 13",
    "detached 22",
    "moves 31 True",
    "dies True",
    "running [True, True]",
    "spread [1, 2, 3]",
    "new 51",
    "value b'value' False",
    "small True",
    "again True",
    "killed",
    "dead [False, True, True, True]",
]


def launch(tmp_path: Path, story: str, rank: int, ranks: int = 4) -> Job:
    script = tmp_path / "program.py"
    script.write_text(story)
    line = [sys.executable, "-m", "hpcray.cli.launch", "-n", str(ranks), "--driver-rank", str(rank)]
    return Job([*line, "--cpus-per-node", "2", str(script)])


def kill_raylet(node: int) -> None:
    (info,) = (info for info in live_sessions() if info.node == node)
    os.kill(info.pid, signal.SIGKILL)


@pytest.mark.slow
def test_another_node_takes_over_and_the_job_goes_on(leak_check: LeakCheck, tmp_path: Path) -> None:
    with launch(tmp_path, STORY.format(wait=NOTICED), rank=1) as job:
        assert job.line() == "ready", job.wait()
        kill_raylet(0)
        killed = time.monotonic()
        lines = [job.line()]
        took = time.monotonic() - killed
        lines += [job.line() for _ in TOLD[1:]]
        ended = job.wait(120)
    assert lines == TOLD, ended.err
    assert ended.code == 7, ended.err
    assert took < 10.0, f"the head moved after {took:.1f} s"
    assert "node 1" in ended.err and "this node is the head from now on" in ended.err
    leak_check.check()


# Never still: tasks, actors, groups and values come and go while the head dies.
STORM = """\
import sys, threading, time
import numpy as np
import hpcray as ray
from hpcray.experimental import internal_kv as kv
from hpcray.util.placement_group import placement_group, remove_placement_group

ray.init(namespace="here")


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Adder:
    def add(self, value):
        return value + 1


@ray.remote(num_cpus=0.5)
def table(value):
    return np.full(50_000, value)


@ray.remote(num_cpus=0.5)
def total(array):
    return int(array.sum())


@ray.remote(num_cpus=0)
def registers(number):  # from other nodes than the program's, too
    found = Adder.options(name=f"from {number}", lifetime="detached", get_if_exists=True).remote()
    return ray.get(found.add.remote(number))


def rounds(number, until, done):
    count = 0
    while time.monotonic() < until:
        count += 1
        name = f"actor {number}.{count}"
        actor = Adder.options(name=name).remote()
        chain = [total.remote(table.remote(count)) for _ in range(4)]
        group = placement_group([{"CPU": 0.1}] * 2, strategy="SPREAD")
        kv._internal_kv_put(name, str(count))
        ident = number * 1000 + count
        assert ray.get(registers.options(scheduling_strategy="SPREAD").remote(ident)) == ident + 1
        assert ray.get(ray.get_actor(name).add.remote(count)) == count + 1
        assert ray.get(chain) == [50_000 * count] * 4
        assert group.wait(60)
        assert kv._internal_kv_get(name) == str(count).encode()
        remove_placement_group(group)
        ray.kill(actor)
        ray.kill(ray.get_actor(f"from {ident}"))
    done[number] = count


done = {}
until = time.monotonic() + float(sys.argv[1])
threads = [threading.Thread(target=rounds, args=(number, until, done)) for number in range(3)]
for thread in threads:
    thread.start()
print("ready", flush=True)
for thread in threads:
    thread.join()
left = [row["name"] for row in ray.util.list_named_actors(all_namespaces=True)]
print(sorted(done), min(done.values()) > 0, left, [row["Alive"] for row in ray.nodes()].count(False), flush=True)
sys.exit(5 if len(done) == 3 else 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("after", [1.0, 2.3, 3.1])
def test_nothing_is_lost_however_busy_the_head_was(leak_check: LeakCheck, tmp_path: Path, after: float) -> None:
    script = tmp_path / "program.py"
    script.write_text(STORM)
    line = [sys.executable, "-m", "hpcray.cli.launch", "-n", "4", "--driver-rank", "2", "--cpus-per-node", "2"]
    with Job([*line, str(script), "8"]) as job:
        assert job.line() == "ready", job.wait()
        time.sleep(after)  # some moment of it: any will do
        kill_raylet(0)
        ended = job.wait(150)
    assert ended.out == "[0, 1, 2] True [] 1\n", ended
    assert ended.code == 5, ended.err
    leak_check.check()


KEEPS = """\
import sys, time
import hpcray as ray

ray.init(namespace="here")


@ray.remote(num_cpus=0)
class Counter:
    def __init__(self, count):
        self.count = count

    def more(self):
        self.count += 1
        return self.count


if sys.argv[1] == "first":
    early = Counter.options(name="early", lifetime="detached", max_restarts=1).remote(10)
    ray.get(early.more.remote())
    print("ready", flush=True)
    while all(row["Alive"] for row in ray.nodes()):
        time.sleep(0.05)
    late = Counter.options(name="late", lifetime="detached").remote(20)
    print(ray.get(late.more.remote()), flush=True)
    sys.exit(3)
print([ray.get(ray.get_actor(name).more.remote(), timeout=60) for name in ("early", "late")], flush=True)
"""


@pytest.mark.slow
def test_the_next_head_goes_on_with_the_journal_on_disk(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(KEEPS)
    line = [sys.executable, "-m", "hpcray.cli.launch", "-n", "3", "--driver-rank", "1", str(script)]
    kept = {"HPCRAY_JOURNAL_DIR": str(tmp_path / "journal")}
    with Job([*line, "first"], kept) as job:
        assert job.line() == "ready", job.wait()
        kill_raylet(0)
        ended = job.wait(120)
    assert ended.out == "21\n" and ended.code == 3, ended
    with Job([*line, "second"], kept) as job:
        ended = job.wait(120)
    assert ended.out == "[11, 21]\n" and ended.code == 0, ended
    leak_check.check()


DRAINS = """\
import time
import hpcray as ray

ray.init()
ray.on_drain(lambda seconds: print("draining", seconds > 0, flush=True))


@ray.remote(num_cpus=0)
def nothing():
    time.sleep(0.01)


print("ready", flush=True)
told = False
while True:
    ray.get(nothing.remote())
    if not told and not all(row["Alive"] for row in ray.nodes()):
        told = True
        print("moved", flush=True)
"""


@pytest.mark.slow
def test_the_next_head_can_end_the_job_in_good_order(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(DRAINS)
    line = [sys.executable, "-m", "hpcray.cli.launch", "-n", "3", "--driver-rank", "2", str(script)]
    with Job(line, {"HPCRAY_DRAIN_SIGNALS": "USR1"}) as job:
        assert job.line() == "ready", job.wait()
        kill_raylet(0)
        assert job.line() == "moved", job.wait()
        (info,) = (info for info in live_sessions() if info.node == 1)
        os.kill(info.pid, signal.SIGUSR1)
        assert job.line() == "draining True", job.wait()
        ended = job.wait(60)
    assert ended.code == 75, ended
    leak_check.check()


@pytest.mark.slow
def test_a_head_that_stood_still_ends_when_it_wakes(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(STORY.format(wait=NOTICED))
    line = [sys.executable, "-m", "hpcray.cli.launch", "-n", "4", "--driver-rank", "1", "--cpus-per-node", "2"]
    with Job([*line, str(script)], {"HPCRAY_HEAD_TIMEOUT": "4", "HPCRAY_NODE_TIMEOUT": "3"}) as job:
        assert job.line() == "ready", job.wait()
        (info,) = (info for info in live_sessions() if info.node == 0)
        os.kill(info.pid, signal.SIGSTOP)
        try:
            lines = [job.line()]
        finally:
            os.kill(info.pid, signal.SIGCONT)
        wait_until(lambda: info.pid not in leak_check.processes(), "the end of the old head")
        lines += [job.line() for _ in TOLD[1:]]
        ended = job.wait(120)
    assert lines == TOLD, ended.err
    assert ended.code == 7, ended.err
    assert "it was not heard of for" in ended.err and "the head has declared this node dead" in ended.err
    leak_check.check()
