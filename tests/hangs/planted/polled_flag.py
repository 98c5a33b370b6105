"""An actor that looks at a flag again and again, which its own next call was to set.

kind: likely
cause: A.set is queued behind A.f, which sleeps until the flag is set.
remedy: max_concurrency=2, or a limit for the loop.
names: A.f
"""

import time

import hpcray as ray


@ray.remote
class A:
    def __init__(self):
        self.ready = False

    def f(self):
        while not self.ready:
            time.sleep(0.5)

    def set(self):
        self.ready = True


ray.init()
a = A.remote()
refs = [a.f.remote(), a.set.remote()]
print("MARK", flush=True)
ray.get(refs)
