"""A child process that writes more than its pipe holds, to a parent that waits for its end.

kind: likely
cause: The parent calls wait() before it reads, and the child waits for room in the pipe.
remedy: communicate() instead of wait().
names: f
"""

import subprocess
import sys

import hpcray as ray


@ray.remote
def f():
    code = "import sys; sys.stdout.write('x' * 1_000_000)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    return child.wait()


ray.init()
print("MARK", flush=True)
ray.get(f.remote())
