"""An async actor all of whose slots await a further call.

kind: certain
cause: A has max_concurrency=2, and both calls of A.f await A.g.
remedy: Raise max_concurrency.
names: A.g
"""

import asyncio

import hpcray as ray


@ray.remote(num_cpus=0, max_concurrency=2)
class A:
    def __init__(self):
        self.inside, self.both = 0, asyncio.Event()

    async def f(self, me):
        self.inside += 1
        if self.inside == 2:
            self.both.set()
        await self.both.wait()
        return await me.g.remote()

    async def g(self):
        return 1


ray.init()
a = A.remote()
ray.get(a.g.remote())
print("MARK", flush=True)
ray.get([a.f.remote(a), a.f.remote(a)])
