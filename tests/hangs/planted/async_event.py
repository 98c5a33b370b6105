"""A coroutine that awaits an event which is never set.

kind: likely
cause: The other side has forgotten to set it.
remedy: asyncio.wait_for with a timeout.
names: A.f
"""

import asyncio

import hpcray as ray


@ray.remote(num_cpus=0)
class A:
    async def f(self):
        await asyncio.Event().wait()


ray.init()
a = A.remote()
call = a.f.remote()
print("MARK", flush=True)
ray.get(call)
