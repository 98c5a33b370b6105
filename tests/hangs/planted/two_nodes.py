"""A lock that is taken twice, in a task on the second of two nodes.

kind: likely
cause: The lock is not reentrant.
remedy: threading.RLock.
names: f
run: -n 2
"""

import threading

import hpcray as ray
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@ray.remote(num_cpus=0)
def f():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


ray.init()
there = ray.nodes()[1]["NodeID"]
ref = f.options(scheduling_strategy=NodeAffinitySchedulingStrategy(there, soft=False)).remote()
print("MARK", flush=True)
ray.get(ref)
