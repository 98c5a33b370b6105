"""A program that tries so many times to get a result, and goes on without it then.

kind: healthy
cause: The loop counts.
"""

import threading

import hpcray as ray


@ray.remote
def f():
    threading.Event().wait()


ray.init()
ref = f.remote()
print("MARK", flush=True)
for _ in range(1000):
    try:
        ray.get(ref, timeout=1)
    except ray.exceptions.GetTimeoutError:
        print(end="")
