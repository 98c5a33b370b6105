"""A task that takes from an empty queue.

kind: likely
cause: The producer has ended without a sentinel.
remedy: Put a sentinel when the producer ends.
names: f
"""

import queue

import hpcray as ray


@ray.remote
def f():
    queue.Queue().get()


ray.init()
print("MARK", flush=True)
ray.get(f.remote())
