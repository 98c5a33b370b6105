"""A task that waits for another one, for which it holds the resource.

kind: certain
cause: outer holds the only licence, and waits for inner, which needs it. (A CPU would be lent meanwhile.)
remedy: Ask for the resource in inner alone.
names: licence
run: --resources {"licence":1}
"""

import hpcray as ray


@ray.remote(resources={"licence": 1}, num_cpus=0)
def inner():
    return 1


@ray.remote(resources={"licence": 1}, num_cpus=0)
def outer():
    return ray.get(inner.remote())


ray.init()
ray.get(inner.remote())
print("MARK", flush=True)
ray.get(outer.remote())
