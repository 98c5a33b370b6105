"""Two actors that call each other and wait.

kind: certain
cause: A.f waits for B.g, and B.g for A.h, which A runs only after A.f.
remedy: Pass the result on instead of waiting for it; or make the actor async, or give it max_concurrency=2.
names: A.h
"""

import hpcray as ray


@ray.remote(num_cpus=0)
class A:
    def meet(self, other):
        self.other = other

    def f(self):
        return ray.get(self.other.g.remote())

    def h(self):
        return 1


@ray.remote(num_cpus=0)
class B:
    def meet(self, other):
        self.other = other

    def g(self):
        return ray.get(self.other.h.remote())


ray.init()
a, b = A.remote(), B.remote()
ray.get([a.meet.remote(b), b.meet.remote(a)])
print("MARK", flush=True)
ray.get(a.f.remote())
