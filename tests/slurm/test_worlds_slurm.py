"""Worlds of several ranks: a job of one node grows to six by three batch jobs, and shrinks to two under load.

    HPCRAY_TEST_TIMES=20 HPCRAY_TEST_BYTES=5368709120 pytest -m slow tests/slurm/test_worlds_slurm.py

does it twenty times, at other moments each time, with 5 GB of objects.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from helpers.slurm import Slurm, boot, leak_checked
from testcluster.cluster import why_not

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = """\
import os, random, sys, threading, time
import numpy as np
import hpcray as ray
from hpcray import cluster

grows, seed, size = sys.argv[1] == "grow", int(sys.argv[2]), int(sys.argv[3])
OBJECTS, BLOCKS, ACTORS, OWNED = 120, 64, 8, 40
rng = random.Random(seed)
ray.init()

def digest_of(array):
    "Blocks have weights: none may be missing, or in another's place."
    return int((array.reshape(BLOCKS, -1).sum(axis=1) * np.arange(1, BLOCKS + 1)).sum()) % 1_000_003

@ray.remote(num_cpus=1, max_retries=-1)
def make(number):
    array = np.empty((BLOCKS, size // BLOCKS // 8), dtype=np.int64)
    array[:] = number * BLOCKS + np.arange(BLOCKS)[:, None]
    return array

@ray.remote(num_cpus=1, max_retries=-1)
def own(number):
    "The worker owns the object, which outlives its node."
    return [ray.put(np.full(1 << 17, number))]

@ray.remote(num_cpus=1, max_retries=-1)
def add(one, other):
    return int(one[0, 0]) + int(other[-1, -1])

@ray.remote(num_cpus=1, max_retries=-1)
def digest(array):
    return digest_of(array)

@ray.remote(num_cpus=0.5, max_retries=-1)
def small(number, text):
    time.sleep(0.02)
    return number + len(text)

@ray.remote(num_cpus=0)
class Keeper:
    "Has what the others know, on the node of the program."
    def __init__(self):
        self.states = {}
    def load(self, name):
        return self.states.get(name, {})
    def store(self, name, number, value):
        self.states.setdefault(name, {})[number] = value

@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Fold:
    "A restart goes on with the state; what was folded is not folded again."
    def __init__(self, name, keeper):
        self.name, self.keeper = name, keeper
        self.seen = ray.get(keeper.load.remote(name))
        self.restarted = bool(self.seen)
    def fold(self, array, number):
        if number not in self.seen:
            value = digest_of(array) + len(self.name) * number
            ray.get(self.keeper.store.remote(self.name, number, value))
            self.seen[number] = value
        return self.seen[number]
    def state(self):
        return self.restarted, sorted(self.seen.items())

def alive():
    return [row for row in ray.nodes() if row["Alive"]]

def pause(most=1.5):
    time.sleep(rng.uniform(0.0, most))

over, done = threading.Event(), 0

def load():
    "Short tasks all the time."
    global done
    while not over.is_set():
        assert ray.get([small.remote(number, "word" * number) for number in range(8)]) == [5 * n for n in range(8)]
        done += 8

begun = time.monotonic()
loader = threading.Thread(target=load, daemon=True)
loader.start()
here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), False)
keeper = Keeper.options(scheduling_strategy=here).remote()
names = [f"fold {'x' * number}" for number in range(ACTORS)]
spread = Fold.options(scheduling_strategy="SPREAD")
folds = [spread.remote(name, keeper) for name in names[: ACTORS // 2]]
kept = [make.remote(number) for number in range(OBJECTS // 3)]
if grows:
    for count in (2, 2, 1):
        cluster.scale(count, cpus=2, time=20, sbatch={"exclusive": True})
        pause()
while len(alive()) < 6:
    time.sleep(0.1)
print("grown", len(alive()), time.monotonic() - begun, flush=True)
folds += [spread.remote(name, keeper) for name in names[ACTORS // 2 :]]
kept += [make.remote(number) for number in range(OBJECTS // 3, OBJECTS)]
boxes = [own.options(scheduling_strategy="SPREAD").remote(number) for number in range(OWNED)]
added = [add.remote(kept[number], kept[number + 1]) for number in range(0, OBJECTS - 1, 5)]
folded = [folds[number % ACTORS].fold.remote(ref, number) for number, ref in enumerate(kept)]
owned = [ref for box in ray.get(boxes) for ref in box]
del boxes

def leave(node):
    cluster.remove_nodes([node], seconds=120)

if grows:
    pause(6.0)
    victims = [row["NodeID"] for row in alive()[1:]]
    rng.shuffle(victims)
    leaving = []
    for node in victims[:4]:
        leaving.append(threading.Thread(target=leave, args=(node,)))
        leaving[-1].start()
        pause(4.0)
    for thread in leaving:
        thread.join()
    print("shrunk", len(alive()), time.monotonic() - begun, flush=True)
total = sum(ray.get(added)) + sum(ray.get(folded))
for value in ray.get([digest.remote(ref) for ref in kept]):
    total = (total * 31 + value) % (1 << 61)
for number, ref in enumerate(owned):
    array = ray.get(ref)
    assert array[0] == array[-1] == number, number
    total = (total * 31 + int(array.sum())) % (1 << 61)
restarts = 0
for restarted, state in ray.get([fold.state.remote() for fold in folds]):
    restarts += restarted
    for number, value in state:
        total = (total * 31 + value) % (1 << 61)
over.set()
loader.join()
assert done > 50
print("facts", done, "short tasks,", restarts, "actors that were restarted,", time.monotonic() - begun, "s", flush=True)
print("digest", total, flush=True)
"""
TIMES = int(os.environ.get("HPCRAY_TEST_TIMES", "2"))
FIRST = int(os.environ.get("HPCRAY_TEST_SEED", "0"))
BYTES = int(os.environ.get("HPCRAY_TEST_BYTES", str(300 << 20)))
STORE = {"HPCRAY_OBJECT_STORE_MEMORY": str(max(256 << 20, BYTES // 3))}
"""Two nodes have less memory than there are objects, which go to disk there."""


@pytest.fixture(scope="module")
def six() -> Iterator[Slurm]:
    """A cluster of six nodes."""
    if reason := why_not():
        pytest.skip(reason)
    cluster = boot(6, "six")
    try:
        with leak_checked(cluster, "worlds") as found:
            yield found
    finally:
        cluster.down()


def digest_of(six: Slurm, nodes: int, *arguments: object) -> str:
    """Run the program as a batch job of so many nodes."""
    script = six.write(PROGRAM)
    job = six.sbatch(
        f"-N{nodes}", "-c2", "-t", "20", six.source / "slurm" / "cpu.sbatch", script, *arguments, environ=STORE
    )
    facts = six.finish(job, 500.0)
    shown = "".join(path.read_text() for path in six.place.glob(f"*{job}*.out"))
    nodes_said = "".join(f"--- {path.name}\n{path.read_text()}" for path in six.place.rglob("nodes-*.out"))
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), six.output() + nodes_said
    print(*[line for line in shown.splitlines() if line.startswith(("grown", "shrunk", "facts"))], sep="\n")
    if arguments[0] == "grow":
        assert "grown 6 " in shown and "shrunk 2 " in shown, shown + nodes_said
    (digest,) = [line for line in shown.splitlines() if line.startswith("digest")]
    return digest


@pytest.fixture(scope="module")
def expected(six: Slurm) -> str:
    """What a job of six nodes finds."""
    return digest_of(six, 6, "fixed", 0, BYTES // 120 // 512 * 512)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + TIMES))
def test_growing_and_shrinking_changes_nothing(six: Slurm, expected: str, seed: int) -> None:
    """Nothing is lost, and nothing is left on the nodes that have left."""
    before = set(six.place.rglob("nodes-*.out"))
    assert digest_of(six, 1, "grow", seed, BYTES // 120 // 512 * 512) == expected
    logs = "".join(path.read_text() for path in set(six.place.rglob("nodes-*.out")) - before)
    assert logs.count("this node has left the job") == 4, logs
    six.wait(lambda: not six.run("squeue", "--noheader").out.strip(), "the end of all batch jobs")
    six.check()
