"""A task that writes a line every few seconds.

kind: healthy
cause: Bytes that are written are progress.
"""

import time

import hpcray as ray


@ray.remote
def f():
    with open("/dev/null", "w") as file:
        while True:
            print("still here", file=file, flush=True)
            time.sleep(5)


ray.init()
ref = f.remote()
print("MARK", flush=True)
ray.get(ref)
