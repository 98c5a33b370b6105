"""A pool of processes one of which has ended in the middle of its work.

kind: likely
cause: multiprocessing.Pool makes another process, and waits for ever for the result of the one that is gone.
remedy: concurrent.futures.ProcessPoolExecutor, which raises BrokenProcessPool.
names: f
"""

import multiprocessing
import os

import hpcray as ray


@ray.remote
def f():
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.apply(os._exit, (1,))


ray.init()
ref = f.remote()
print("MARK", flush=True)
ray.get(ref)
