"""A task at a breakpoint.

kind: healthy
cause: A user debugs it.
"""

import hpcray as ray


@ray.remote
def f():
    breakpoint()
    return 1


ray.init()
ref = f.remote()
print("MARK", flush=True)
ray.get(ref)
