"""A job that may get further nodes.

kind: healthy
cause: One of them may run the task.
run: --max-nodes 4
"""

import hpcray as ray


@ray.remote
class Holder:
    def ready(self):
        return True


ray.init()
holders = [Holder.options(num_cpus=1).remote() for _ in range(int(ray.cluster_resources()["CPU"]))]
ray.get([holder.ready.remote() for holder in holders])
ref = ray.remote(lambda: 1).remote()
print("MARK", flush=True)
ray.get(ref)
