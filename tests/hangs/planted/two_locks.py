"""Two threads of an actor take two locks in different order.

kind: likely
cause: Each holds the lock that the other one wants.
remedy: Take locks in one order everywhere.
names: A
"""

import threading

import hpcray as ray


@ray.remote(num_cpus=0, max_concurrency=2)
class A:
    def __init__(self):
        self.locks = threading.Lock(), threading.Lock()
        self.both = threading.Barrier(2)

    def f(self, first):
        with self.locks[first]:
            self.both.wait()
            with self.locks[1 - first]:
                return first


ray.init()
a = A.remote()
calls = [a.f.remote(0), a.f.remote(1)]
print("MARK", flush=True)
ray.get(calls)
