"""A program that looks for a file while it waits for a task.

kind: healthy
cause: Another job may write the file. (That the task waits for ever does not matter.)
"""

import os
import threading

import hpcray as ray


@ray.remote
def f():
    threading.Event().wait()


ray.init()
ref = f.remote()
print("MARK", flush=True)
while not os.path.exists("/nowhere/ready"):
    ray.wait([ref], timeout=1)
