"""Two async actors that call each other, one of which keeps an asyncio.Lock meanwhile.

kind: likely
cause: A.f has the lock and awaits B.g, and that awaits A.h, which needs the lock.
remedy: Give the lock back before the await.
names: A.h
"""

import asyncio

import hpcray as ray


@ray.remote
class A:
    def __init__(self):
        self.lock = asyncio.Lock()

    async def f(self, me, b):
        async with self.lock:
            await b.g.remote(me)

    async def h(self):
        async with self.lock:
            pass


@ray.remote
class B:
    async def g(self, a):
        await a.h.remote()


ray.init()
a, b = A.remote(), B.remote()
ref = a.f.remote(a, b)
print("MARK", flush=True)
ray.get(ref)
