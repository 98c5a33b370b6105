"""A job of four nodes to look at, and what each command that looks at a job has to say of it."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass

from helpers.terminal import PATIENCE, Terminal

PROGRAM = """\
import sys, time
import numpy as np
import hpcray as ray
from hpcray.util.metrics import Counter
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

ray.init()
nodes = [node["NodeID"] for node in sorted(ray.nodes(), key=lambda node: node["Index"])]


def on(node):
    return On(nodes[node], False)


@ray.remote(num_cpus=0)
def block(number):
    print("block", number, "is made")
    return np.full(1 << 17, number)


@ray.remote(num_cpus=0)
def computing():
    while True:
        sum(range(1000))
        time.sleep(0.001)


@ray.remote(num_cpus=0)
def reading(refs):
    return ray.get(refs)


@ray.remote(num_cpus=0)
def stopping(number):
    breakpoint()
    return number


@ray.remote(num_cpus=10_000)
def never():
    pass


@ray.remote(num_cpus=0)
class Holder:
    def __init__(self):
        self.kept = []

    def name(self):
        print("the holder speaks")
        return "held"


Counter("requests", "number of requests").inc()
blocks = [block.options(scheduling_strategy=on(number)).remote(number) for number in range(4)]
assert [int(found[0]) for found in ray.get(blocks)] == [0, 1, 2, 3]
holder = Holder.options(name="the holder", scheduling_strategy=on(1)).remote()
assert ray.get(holder.name.remote()) == "held"
busy = computing.options(scheduling_strategy=on(2)).remote()
waits = reading.options(scheduling_strategy=on(1)).remote([busy])
stops = [stopping.options(scheduling_strategy=on(3)).remote(7), stopping.options(scheduling_strategy=on(0)).remote(8)]
hopeless = never.remote()
time.sleep(1.5)  # the metrics are written once a second
print("watch", waits.hex(), flush=True)
print("released", sorted(ray.get(stops)), flush=True)
"""


@dataclass(frozen=True)
class Look:
    """A command, and what its output has to hold.

    Attributes:
        words: the command; REF is the object that waits. shows: regular expressions.
        code: its exit code. extra: seconds that it measures, beyond those that it may take.
        fits: whether its lines fit a terminal of 80 columns. local: whether a login host needs no job to say it.
    """

    words: str
    shows: tuple[str, ...]
    code: int = 0
    extra: float = 0.0
    fits: bool = True
    local: bool = False


LOOKS = (
    Look("jobs", (r"RUNNING",), local=True),
    Look("status", (r"node 0 +\S+ +alive", r"node 3 +\S+ +alive", r"waiting:", r"CPU: 10000", r"can ever serve")),
    Look("top --once --interval 1", (r"4 nodes", r"node 3", r"computing +1", r"block +4"), extra=1.0),
    Look("list actors", (r"Holder", r"ALIVE", r"1 actors")),
    Look("list tasks", (r"computing", r"RUNNING", r"never", r"PENDING")),
    Look("list nodes", (r"node 2", r"ALIVE", r"4 nodes")),
    Look("list workers", (r"WORKER", r"DRIVER", r"workers")),
    Look("list objects", (r"objects",)),
    Look("list jobs", (r"RUNNING", r"1 jobs")),
    Look("list placement-groups", (r"0 placement-groups",)),
    Look("list cluster-events", (r"cluster-events",)),
    Look("summary tasks", (r"computing +RUNNING: 1", r"block +FINISHED: 4")),
    Look("summary actors", (r"Holder +ALIVE: 1",)),
    Look("summary objects", (r"total_objects",)),
    Look("logs", (r"block 3 is made", r"the holder speaks", r"node 1\)"), fits=False),
    Look("logs --task block --node 2", (r"^\(block pid=\d+, node 2\) block 2 is made$",), fits=False),
    Look("logs --actor 'the holder'", (r"the holder speaks",), fits=False),
    Look("why", (r"driver, pid \d+\) waits for", r"process 3\.\d+ .* runs stopping for"), fits=False),
    Look("why REF", (r"runs reading", r"runs computing for"), fits=False),
    Look("stack", (r"runs computing for", r"runs stopping for", r"node 3"), fits=False),
    Look("memory", (r"node 1 \(", r"1\.0 MiB", r"all 4 nodes: \d+ objects")),
    Look("memory --growth 0.5", (r"nothing has changed: \d+ objects",), extra=0.5),
    Look("timeline timeline.json", (r"timeline\.json; hint",), fits=False),
    Look("profile --seconds 1 -o p.txt", (r"on 4 nodes", r"computing", r"p\.txt: folded"), extra=1.0),
    Look("profile --seconds 0.5 --node 2 --task computing", (r"computing",), extra=0.5),
    Look("profile --memory --seconds 0.5 --actor Holder", (r"of Python", r"actor Holder"), extra=0.5),
    Look("debug --list", (r"Active breakpoints:", r"0 +stopping", r"1 +stopping")),
    Look("metrics", (r'ray_tasks{Name="block"', r"ray_requests", r"ray_object_transfer_bytes_total"), fits=False),
    Look("worker-logs", (r"worker-.*\.out",), fits=False),
    Look("status --json", (r'"stores"',), fits=False),
    Look("top --json --interval 0.5", (r'"functions"',), extra=0.5, fits=False),
    Look("debug --json", (r'"name": "stopping"',), fits=False),
    Look("timeline /nowhere/t.json", (r"^Error: /nowhere/t\.json: No such file or directory$",), code=1),
    Look("profile --seconds 0.2 -o /nowhere/p.txt", (r"^Error: /nowhere/p\.txt: No such file",), code=1, local=True),
    Look("logs --node 9", (r"there is no node 9; hint",), code=1),
    Look("profile --seconds 0.2 --actor nobody", (r"no actor 'nobody'; hint",), code=1),
    Look("profile --seconds 0.2 --node 9", (r"no node 9; hint",), code=1),
    Look("debug 17", (r"no breakpoint 17 waits",), code=1),
    Look("why 00", (r"no object, task or actor '00'; hint",), code=1),
    Look("why never", (r"never: 1 PENDING", r"10000"), fits=False),
)


def missing(look: Look, text: str) -> list[str]:
    """What the output of a command lacks."""
    return [pattern for pattern in look.shows if not re.search(pattern, text, re.MULTILINE)]


def tokens(listed: str) -> list[str]:
    """The breakpoints that `hpcray debug --json` lists."""
    return [row["token"] for row in json.loads(listed)]


def look_around(top: Terminal) -> None:
    """Go by keys through `hpcray top` in a terminal of 80 columns: a node, a process and its stack, a living actor and
    its stack, transfers, the order of functions, one function; and leave it."""
    text = top.shows("4 nodes", "computing", "functions by total time", "q Quit")
    assert max(map(len, text.splitlines())) <= 80
    top.press("\x1b[B\x1b[B\r")
    top.shows("node 2 (", "computing", "process", "esc Back")
    top.press("\r")
    top.shows("process, stacks at", "runs computing for", "in computing")
    top.press("\x1b")
    top.shows("node 2 (", "process")
    top.press("\x1b")
    top.shows("functions by total time")
    top.press("a")
    top.shows("1 actors, 1 of them alive", "Holder", "ALIVE")
    top.press("\r")
    top.shows("actor Holder, stacks at", "name: the holder", "runs no call now")
    top.press("\x1b")
    top.shows("1 actors, 1 of them alive")
    top.press("\x1b")
    top.shows("functions by total time")
    top.press("t")
    top.shows("0 transfers", "esc Back")
    top.press("\x1b")
    top.shows("functions by total time")
    top.press("o")
    top.shows("functions by running")
    top.press("\t\r")
    top.shows("run times of", "in all, p50", "esc Back")
    top.press("\x1b")
    top.shows("functions by running")
    top.press("q")
    assert top.ends() == 0 and top.left_alternate_screen


def debug_by_hand(debug: Terminal, number: int) -> None:
    """Choose the first breakpoint that `hpcray debug` lists, look at a variable there, and let the task go on."""
    text = debug.shows("Active breakpoints:", "stopping", "Enter breakpoint index")
    assert max(map(len, text.splitlines())) <= 80
    debug.press("0\r")
    debug.shows("-> return number", "(Pdb)")
    debug.press("p number * 100\r")
    debug.shows(f"{number}00")
    debug.press("c\r")
    debug.shows("the task goes on")
    deadline = time.monotonic() + PATIENCE
    while debug.printed.count("Enter breakpoint index") < 2:  # it asks again, and reads the key
        assert time.monotonic() < deadline and debug.read(), debug.text
    debug.press("\x04")
    assert debug.ends() == 0
