"""A constructor that waits for a call of its own actor.

kind: likely
cause: B.__init__ waits for A.f, which waits for B.g, which B runs only after its constructor.
remedy: Do not wait in constructors for calls that lead back to them.
names: A.f
"""

import hpcray as ray


@ray.remote(num_cpus=0)
class A:
    def f(self, name):
        return ray.get(ray.get_actor(name).g.remote())

    def ready(self):
        return True


@ray.remote(num_cpus=0)
class B:
    def __init__(self, a):
        self.value = ray.get(a.f.remote("b"))

    def g(self):
        return 1


ray.init()
a = A.remote()
ray.get(a.ready.remote())
print("MARK", flush=True)
b = B.options(name="b").remote(a)
ray.get(b.g.remote())
