"""Two nodes of one host: their processes speak to each other directly, and what a raylet knows is still heard."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.jobs import Job, as_module
from helpers.leaks import LeakCheck
from helpers.scripts import write

from hpcray.platform.launcher_environment import open_mpi_wheel_prefix

pytestmark = [
    pytest.mark.skipif(not open_mpi_wheel_prefix(), reason="no Open MPI from PyPI"),
    pytest.mark.timeout(120),
]

COMMON = """\
import os, signal, time
import numpy as np
import hpcray as ray
from hpcray.runtime.core_worker.core_worker import need_process
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init()
here = ray.get_runtime_context().get_node_id()
other = next(node["NodeID"] for node in ray.nodes() if node["NodeID"] != here)

@ray.remote(num_cpus=0)
class Actor:
    def where(self):
        return os.getpid(), need_process().me
    def links(self, proc):
        engine = need_process().engine
        return engine.peers[proc].link is not engine.links.raylet
    def read(self, refs):
        return [len(value) for value in ray.get(refs)]
    def keep(self, size):
        self.ref = ray.put(bytes(size))
        return [self.ref]
    def stay(self):
        time.sleep(100)

actor = Actor.options(scheduling_strategy=On(other, False)).remote()
pid, proc = ray.get(actor.where.remote())
"""

DIRECT = (
    COMMON
    + """\
me = need_process()
direct = me.engine.peers[proc].link is not me.engine.links.raylet
print("ours", direct, "theirs", ray.get(actor.links.remote(me.me)))
small = [ray.put(bytes(size)) for size in (1, 1000, 100_000)]
print("read there", ray.get(actor.read.remote(small)))
print("read here", len(ray.get(ray.get(actor.keep.remote(100_000))[0])))
"""
)

KILLED = (
    COMMON
    + """\
kept = ray.get(actor.keep.remote(100))[0]
call = actor.stay.remote()
time.sleep(0.2)
os.kill(pid, signal.SIGKILL)
for what in (call, kept):
    try:
        ray.get(what, timeout=30)
    except ray.exceptions.RayError as error:
        print(type(error).__name__, "signal 9" in str(error), flush=True)

@ray.remote(max_retries=0)
def die():
    os.kill(os.getpid(), signal.SIGKILL)

try:
    ray.get(die.options(scheduling_strategy=On(other, False)).remote(), timeout=30)
except ray.exceptions.WorkerCrashedError as error:
    print(type(error).__name__, "signal 9" in str(error))
"""
)

LAST_ANSWERS = (
    COMMON
    + """\
@ray.remote(num_cpus=0)
class Short:
    def call(self, number):
        if number == 500:
            engine = need_process().engine
            with engine.lock:
                engine.flush()
                engine.links.write_all(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        return number

lost = 0
for _ in range(5):
    short = Short.options(scheduling_strategy=On(other, False)).remote()
    calls = [short.call.remote(number) for number in range(3000)]  # still being sent when it dies
    for call in calls[:500]:
        try:
            ray.get(call, timeout=30)
        except ray.exceptions.RayError:
            lost += 1
print("lost", lost)
"""
)

DEAD_OWNERS = (
    COMMON
    + """\
@ray.remote(num_cpus=0)
class Maker:
    def large(self):
        return bytes(2_000_000)

@ray.remote(num_cpus=0)
class Owner:
    def __init__(self, maker):
        self.maker = maker
    def call(self):
        self.ref = self.maker.large.remote()
        ray.wait([self.ref], fetch_local=False)
        return os.getpid()

maker = Maker.options(scheduling_strategy=On(other, False)).remote()
for _ in range(10):
    owner = Owner.options(scheduling_strategy=On(here, False)).remote(maker)
    os.kill(ray.get(owner.call.remote()), signal.SIGKILL)
owner = Owner.options(scheduling_strategy=On(here, False)).remote(maker)
ray.get(owner.call.remote())
ray.kill(maker)  # who made it dies first
time.sleep(1)
ray.kill(owner)
until = time.monotonic() + 20
def held():
    return sum(len(row["list"]) for row in need_process().diagnostics.list_stores(100, 5))


while (left := held()) and time.monotonic() < until:
    time.sleep(0.1)
print("left", left)
"""
)

NO_DESCRIPTORS = (
    COMMON
    + """\
import resource
actors = [Actor.options(scheduling_strategy=On(other, False)).remote() for _ in range(12)]
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
hog = []
try:
    while True:
        hog.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
ready, _ = ray.wait([one.where.remote() for one in actors], num_returns=12, timeout=30)
for fd in hog:
    os.close(fd)
print("ready", len(ready))
"""
)

DAEMON = (
    COMMON
    + """\
@ray.remote(num_cpus=0)
class Parent:
    def begin(self):
        child = os.fork()
        if child == 0:
            os.setsid()
            time.sleep(100)
            os._exit(0)
        self.ref = ray.put(bytes(20_000))  # a smaller value travels with its ref
        return os.getpid(), child, [self.ref]

for node in (other, here):
    parent = Parent.options(scheduling_strategy=On(node, False)).remote()
    pid, child, (kept,) = ray.get(parent.begin.remote())
    os.kill(pid, signal.SIGKILL)
    try:
        ray.get(kept, timeout=20)
    except ray.exceptions.RayError as error:
        print(type(error).__name__)
    try:
        os.kill(child, signal.SIGKILL)
    except ProcessLookupError:  # hpcray was faster
        pass
"""
)


@pytest.mark.parametrize(("same_host", "direct"), [("1", True), ("0", False)])
def test_processes_of_two_nodes_speak_directly_unless_told_otherwise(
    leak_check: LeakCheck, tmp_path: Path, same_host: str, direct: bool
) -> None:
    with Job(as_module(2, write(tmp_path, DIRECT)), {"HPCRAY_SAME_HOST": same_host}) as job:
        ended = job.wait(60)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == [
        f"ours {direct} theirs {direct}",
        "read there [1, 1000, 100000]",
        "read here 100000",
    ]


@pytest.mark.parametrize("same_host", ["1", "0"])
def test_how_a_process_died_is_told_by_its_raylet(leak_check: LeakCheck, tmp_path: Path, same_host: str) -> None:
    with Job(as_module(2, write(tmp_path, KILLED)), {"HPCRAY_SAME_HOST": same_host}) as job:
        ended = job.wait(60)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == ["ActorDiedError True", "OwnerDiedError True", "WorkerCrashedError True"]


@pytest.mark.parametrize(
    ("program", "says"),
    [
        pytest.param(LAST_ANSWERS, ["lost 0"], id="answers that were not read yet when a call could not be sent"),
        pytest.param(DEAD_OWNERS, ["left 0"], id="objects of owners that died"),
        pytest.param(NO_DESCRIPTORS, ["ready 12"], id="answers to a process without a free descriptor"),
        pytest.param(DAEMON, ["OwnerDiedError", "OwnerDiedError"], id="a death that a daemon outlives"),
    ],
)
@pytest.mark.usefixtures("both_ways")
def test_nothing_depends_on_the_way(leak_check: LeakCheck, tmp_path: Path, program: str, says: list[str]) -> None:
    with Job(as_module(2, write(tmp_path, program))) as job:
        ended = job.wait(100)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == says
