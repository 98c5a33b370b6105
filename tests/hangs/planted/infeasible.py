"""A request that no node can serve.

kind: likely
cause: No node has the resource, and none is started that has it.
remedy: Ask for less, or start a node that has it.
names: gizmo
"""

import hpcray as ray


@ray.remote(resources={"gizmo": 1})
def f():
    return 1


ray.init()
print("MARK", flush=True)
ray.get(f.remote())
