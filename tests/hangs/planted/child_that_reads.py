"""A child process that reads to the end of its input, which its parent never closes.

kind: likely
cause: The parent keeps the writing end of the pipe and waits for the child.
remedy: communicate(), or close stdin first.
names: f
"""

import subprocess

import hpcray as ray


@ray.remote
def f():
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE).wait()


ray.init()
ref = f.remote()
print("MARK", flush=True)
ray.get(ref)
