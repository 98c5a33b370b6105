"""A program that asks for a result again and again, and sleeps in between.

kind: likely
cause: Neither time.sleep nor ray.wait(timeout=0) makes the task end, which waits for ever.
remedy: A limit for the whole loop.
names: f
"""

import threading
import time

import hpcray as ray


@ray.remote
def f():
    threading.Event().wait()


def is_there(ref):
    ready, _ = ray.wait([ref], timeout=0)
    return len(ready) > 0


ray.init()
ref = f.remote()
print("MARK", flush=True)
while not is_there(ref):
    time.sleep(1)
