"""A program that polls for a task which hangs.

kind: likely
cause: ray.wait(timeout=1) in a loop, for a task that waits for ever.
remedy: A limit for the whole loop.
names: f
"""

import threading

import hpcray as ray


@ray.remote
def f():
    threading.Event().wait()


ray.init()
ref = f.remote()
print("MARK", flush=True)
while not ray.wait([ref], timeout=1)[0]:
    pass
