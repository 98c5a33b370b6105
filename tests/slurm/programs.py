"""The programs that the Slurm tests run."""

from __future__ import annotations

# Says which hosts ran tasks, one task on every node.
HOSTS = """\
import os, socket, sys
import hpcray as ray
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

ray.init()


@ray.remote
def where():
    return socket.gethostname()


nodes = ray.nodes()
refs = [where.options(scheduling_strategy=On(node["NodeID"], soft=False)).remote() for node in nodes]
print("job", os.environ.get("SLURM_JOB_ID"), "task", os.environ.get("SLURM_ARRAY_TASK_ID"), *sys.argv[1:])
print("uid", os.getuid(), "driver", socket.gethostname())
print("hosts", *sorted(ray.get(refs)), flush=True)
"""

# Ends as it is told.
ENDING = """\
import sys
import hpcray as ray

ray.init()
assert ray.get(ray.remote(lambda: 41).remote()) == 41
if sys.argv[1] == "raise":
    raise ValueError("as the test wants it")
sys.exit(int(sys.argv[1]))
"""

# Keeps every node busy until it is ended; says "ready" when it does.
BUSY = """\
import subprocess, sys, time
import numpy as np
import hpcray as ray
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

ray.init()


@ray.remote(num_cpus=0)
class Busy:
    def __init__(self):
        self.block = ray.put(np.ones(1_000_000))
        self.child = subprocess.Popen(["sleep", "600"], start_new_session=True)

    def ready(self):
        return True

    def work(self):
        time.sleep(600)


actors = [Busy.options(scheduling_strategy=On(node["NodeID"], soft=False)).remote() for node in ray.nodes()]
ray.get([actor.ready.remote() for actor in actors])
print("ready", len(actors), flush=True)
ray.get([actor.work.remote() for actor in actors])
"""

# Joins the session of this node; says what it finds and leaves a note for who started it.
VISITOR = """\
import sys
import hpcray as ray

ray.init(address="auto", namespace="shared")
board = ray.get_actor("board")
print("nodes", len(ray.nodes()), "task", ray.get(ray.remote(lambda x: x + 1).remote(41)), flush=True)
ray.get(board.note.remote(sys.argv[1]))
"""

# Waits for as many visitors as it is told.
HOSTESS = """\
import sys, time
import hpcray as ray

ray.init(namespace="shared")


@ray.remote(num_cpus=0)
class Board:
    def __init__(self):
        self.notes = []

    def note(self, text=None):
        self.notes += [text] if text else []
        return self.notes


board = Board.options(name="board").remote()
ray.get(board.note.remote())
print("ready", flush=True)
deadline = time.monotonic() + 60
while len(ray.get(board.note.remote())) < int(sys.argv[1]) and time.monotonic() < deadline:
    time.sleep(0.05)
print("notes", *ray.get(board.note.remote()), flush=True)
"""

# One actor for each piece of the cluster's GPUs; says which device each of them sees.
GPUS = """\
import os, socket, sys
import hpcray as ray

ray.init()
piece = float(sys.argv[1])


@ray.remote(num_gpus=piece, num_cpus=0)
class Holder:
    def seen(self):
        return f"{socket.gethostname()}:{os.environ.get('CUDA_VISIBLE_DEVICES')}"


holders = [Holder.remote() for _ in range(int(ray.cluster_resources().get("GPU", 0) / piece))]
print("devices", *sorted(ray.get([holder.seen.remote() for holder in holders])))


@ray.remote
def without():
    return os.environ.get("CUDA_VISIBLE_DEVICES", "unset")


print("none", repr(ray.get(without.remote())), flush=True)
"""

# Says how many CPUs the node offers, and on how many a task may run.
CPUS = """\
import os
import hpcray as ray

ray.init()
print(ray.nodes()[0]["Resources"]["CPU"], ray.get(ray.remote(lambda: len(os.sched_getaffinity(0))).remote()))
"""
