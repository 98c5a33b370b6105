"""A task that computes a little all the time.

kind: healthy
cause: It uses more than a hundredth of a core.
"""

import time

import hpcray as ray


@ray.remote
def f():
    while True:
        end = time.thread_time() + 0.03
        while time.thread_time() < end:
            pass
        time.sleep(1)


ray.init()
ref = f.remote()
print("MARK", flush=True)
ray.get(ref)
