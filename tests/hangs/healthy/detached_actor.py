"""A program that keeps a detached actor for others.

kind: healthy
cause: Others may use the actor.
"""

import threading

import hpcray as ray


@ray.remote(num_cpus=0)
class Store:
    def ready(self):
        return True


ray.init()
store = Store.options(name="store", lifetime="detached").remote()
ray.get(store.ready.remote())
print("MARK", flush=True)
threading.Event().wait()
