"""A blocking `get` in a coroutine of an async actor.

kind: certain
cause: A.f blocks the event loop in ray.get, and A.g, for which it waits, runs on the same loop.
remedy: await the ref instead of ray.get.
names: A.f
"""

import hpcray as ray


@ray.remote(num_cpus=0)
class A:
    async def f(self, me):
        return ray.get(me.g.remote())

    async def g(self):
        return 1


ray.init()
a = A.remote()
ray.get(a.g.remote())
print("MARK", flush=True)
ray.get(a.f.remote(a))
