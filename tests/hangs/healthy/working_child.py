"""A task that waits for a child process which computes a little.

kind: healthy
cause: What descendants compute is progress.
"""

import subprocess
import sys

import hpcray as ray

WORK = """
import time
while True:
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    time.sleep(2)
"""


@ray.remote
def f():
    return subprocess.run([sys.executable, "-c", WORK], check=False).returncode


ray.init()
ref = f.remote()
print("MARK", flush=True)
ray.get(ref)
