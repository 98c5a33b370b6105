"""An actor that waits for a task which calls the actor.

kind: certain
cause: A.f waits for the task helper, and that for A.g, which A runs only after A.f.
remedy: Pass the data to the task instead of the actor.
names: helper
"""

import hpcray as ray


@ray.remote(num_cpus=0)
def helper(actor):
    return ray.get(actor.g.remote())


@ray.remote(num_cpus=0)
class A:
    def f(self, me):
        return ray.get(helper.remote(me))

    def g(self):
        return 1


ray.init()
a = A.remote()
ray.get(a.g.remote())
print("MARK", flush=True)
ray.get(a.f.remote(a))
