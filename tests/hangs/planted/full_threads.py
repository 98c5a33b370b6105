"""An actor with two threads, both of which wait for a third call.

kind: certain
cause: Both threads of A are in A.f, which waits for A.g.
remedy: Raise max_concurrency, or put g into a concurrency group of its own.
names: A.g
"""

import threading

import hpcray as ray


@ray.remote(num_cpus=0, max_concurrency=2)
class A:
    def __init__(self):
        self.both = threading.Barrier(2)

    def f(self, me):
        self.both.wait()
        return ray.get(me.g.remote())

    def g(self):
        return 1


ray.init()
a = A.remote()
ray.get(a.g.remote())
print("MARK", flush=True)
ray.get([a.f.remote(a), a.f.remote(a)])
