"""A `wait` of an actor for its own call.

kind: certain
cause: A.f waits with ray.wait, without a timeout, for A.g, which A runs only after A.f.
remedy: Give the wait a timeout, or call self.g().
names: A.g
"""

import hpcray as ray


@ray.remote(num_cpus=0)
class A:
    def f(self, me):
        done, _ = ray.wait([me.g.remote()])
        return ray.get(done[0])

    def g(self):
        return 1


ray.init()
a = A.remote()
ray.get(a.g.remote())
print("MARK", flush=True)
ray.get(a.f.remote(a))
