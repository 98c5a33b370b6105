"""A coroutine that sleeps.

kind: healthy
cause: The sleep ends by itself.
"""

import asyncio

import hpcray as ray


@ray.remote(num_cpus=0)
class A:
    async def f(self):
        await asyncio.sleep(3600)


ray.init()
a = A.remote()
call = a.f.remote()
print("MARK", flush=True)
ray.get(call)
