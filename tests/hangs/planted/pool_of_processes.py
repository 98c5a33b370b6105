"""A pool of processes one of which was killed.

kind: likely
cause: multiprocessing.Pool makes another process, and waits for ever for the result of the one that is gone.
remedy: concurrent.futures.ProcessPoolExecutor, which raises BrokenProcessPool.
names: f
"""

import multiprocessing
import os
import signal

import hpcray as ray


def work(number):
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@ray.remote
def f():
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(work, [1, 2, 3])


ray.init()
ref = f.remote()
print("MARK", flush=True)
ray.get(ref)
