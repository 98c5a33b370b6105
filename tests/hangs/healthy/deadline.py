"""A program that waits for a task until a time it has set itself.

kind: healthy
cause: The loop ends by the clock.
"""

import threading
import time

import hpcray as ray


@ray.remote
def f():
    threading.Event().wait()


ray.init()
ref = f.remote()
end = time.monotonic() + 3600
print("MARK", flush=True)
while time.monotonic() < end:
    ray.wait([ref], timeout=1)
