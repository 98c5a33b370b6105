"""A compiled graph, one of whose calls never ends.

kind: likely
cause: The call waits for an event that is never set, and the program waits for its result without a timeout.
remedy: get with a timeout.
names: A.f
"""

import threading

import hpcray as ray
from hpcray.dag import InputNode


@ray.remote
class A:
    def f(self, x):
        threading.Event().wait()


ray.init()
a = A.remote()
with InputNode() as x:
    graph = a.f.bind(x).experimental_compile()
ref = graph.execute(1)
print("MARK", flush=True)
ray.get(ref, timeout=-1)
