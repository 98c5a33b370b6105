"""A program that waits with a timeout, and begins anew each time.

kind: likely
cause: The error is caught in a loop without end, and the task waits for ever.
remedy: Give up after so many tries.
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
while True:
    try:
        ray.get(ref, timeout=2)
        break
    except ray.exceptions.GetTimeoutError:
        continue
