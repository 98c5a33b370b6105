"""A barrier for more threads than there are.

kind: likely
cause: The barrier waits for three, and only two calls come.
remedy: As many parties as callers.
names: A
"""

import threading

import hpcray as ray


@ray.remote(num_cpus=0, max_concurrency=3)
class A:
    def __init__(self):
        self.all = threading.Barrier(3)

    def f(self):
        self.all.wait()


ray.init()
a = A.remote()
calls = [a.f.remote() for _ in range(2)]
print("MARK", flush=True)
ray.get(calls)
