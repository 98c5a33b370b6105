"""A call whose argument is made by an actor that waits for the call.

kind: certain
cause: A.f waits for B.g, whose argument is the result of A.h, which is queued behind A.f.
remedy: Make the argument before A.f begins.
names: B.g
"""

import hpcray as ray


@ray.remote(num_cpus=0)
class A:
    def f(self, me, other):
        return ray.get(other.g.remote(me.h.remote()))

    def h(self):
        return 1


@ray.remote(num_cpus=0)
class B:
    def g(self, value):
        return value


ray.init()
a, b = A.remote(), B.remote()
ray.get([a.h.remote(), b.g.remote(1)])
print("MARK", flush=True)
ray.get(a.f.remote(a, b))
