"""A program that waits for a detached actor until another program opens its gate.

kind: healthy
cause: A program to come may find the actor by its name, and call it.
"""

import asyncio

import hpcray as ray


@ray.remote(num_cpus=0)
class Gate:
    def __init__(self):
        self.opened = asyncio.Event()

    async def wait(self):
        await self.opened.wait()

    async def open(self):
        self.opened.set()


ray.init(namespace="shared")
gate = Gate.options(name="gate", lifetime="detached").remote()
ref = gate.wait.remote()
print("MARK", flush=True)
ray.get(ref)
