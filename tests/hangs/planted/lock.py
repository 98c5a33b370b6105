"""A task that takes a lock twice.

kind: likely
cause: The lock is not reentrant, and is never released.
remedy: threading.RLock.
names: f
"""

import threading

import hpcray as ray


@ray.remote
def f():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


ray.init()
print("MARK", flush=True)
ray.get(f.remote())
