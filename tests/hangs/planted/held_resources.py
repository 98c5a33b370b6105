"""Actors hold all CPUs that a task needs.

kind: likely
cause: The actors hold their CPUs as long as they live, and the program waits for a task before it lets them go.
remedy: num_cpus=0 for actors that mostly wait; or fewer of them.
names: hold for life
"""

import hpcray as ray


@ray.remote(num_cpus=1)
class Holder:
    def ready(self):
        return True


@ray.remote(num_cpus=1)
def f():
    return 1


ray.init()
holders = [Holder.remote() for _ in range(int(ray.cluster_resources()["CPU"]))]
ray.get([one.ready.remote() for one in holders])
print("MARK", flush=True)
ray.get(f.remote())
