"""A generator that waits for its reader, which waits for the actor.

kind: likely
cause: A.items may be two values ahead of its reader, and the program waits for A.g, which is queued behind it.
remedy: Read the generator's values first, or give A max_concurrency=2.
names: A.g
"""

import hpcray as ray


@ray.remote
class A:
    def items(self):
        yield from range(100)

    def g(self):
        return 1


ray.init()
a = A.remote()
found = a.items.options(num_returns="streaming", _generator_backpressure_num_objects=2).remote()
ref = a.g.remote()
print("MARK", flush=True)
ray.get(ref)
