"""A circle of calls while another task computes.

kind: certain
cause: A.f waits for A.g, which A runs only after A.f. That others work does not matter.
remedy: Call the method directly: self.g().
names: A.g
"""

import time

import hpcray as ray


@ray.remote(num_cpus=0)
def busy():
    end = time.monotonic() + 600
    while time.monotonic() < end:
        sum(range(10_000))
        time.sleep(0.01)


@ray.remote(num_cpus=0)
class A:
    def f(self, me):
        return ray.get(me.g.remote())

    def g(self):
        return 1


ray.init()
other = busy.remote()
a = A.remote()
ray.get(a.g.remote())
print("MARK", flush=True)
ray.get(a.f.remote(a))
