"""A task that waits for a child process which hangs.

kind: likely
cause: The child takes a lock twice.
remedy: A timeout for the child.
names: f
"""

import subprocess
import sys

import hpcray as ray


@ray.remote
def f():
    code = "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()"
    return subprocess.run([sys.executable, "-c", code], check=True).returncode


ray.init()
print("MARK", flush=True)
ray.get(f.remote())
