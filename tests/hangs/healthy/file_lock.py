"""A task that waits for the lock of a file.

kind: healthy
cause: Another job may hold it.
"""

import fcntl
import os
import tempfile

import hpcray as ray


@ray.remote
def f():
    with tempfile.TemporaryDirectory() as place:
        path = os.path.join(place, "lock")
        with open(path, "w") as first, open(path, "w") as second:
            fcntl.flock(first, fcntl.LOCK_EX)
            fcntl.flock(second, fcntl.LOCK_EX)


ray.init()
ref = f.remote()
print("MARK", flush=True)
ray.get(ref)
