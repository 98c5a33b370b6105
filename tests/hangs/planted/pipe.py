"""A task that reads from a pipe into which nothing is written.

kind: likely
cause: The process keeps the writing end open itself, so the end of the file never comes.
remedy: Close the writing end.
names: f
"""

import os

import hpcray as ray


@ray.remote
def f():
    read, write = os.pipe()
    return os.read(read, 1), write


ray.init()
print("MARK", flush=True)
ray.get(f.remote())
