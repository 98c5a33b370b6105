"""Three actors in a ring.

kind: certain
cause: Each waits for a call of the next one, the last for one of the first.
remedy: Let the program call one after the other.
names: C.run
"""

import hpcray as ray


class Ring:
    def meet(self, following):
        self.following = following

    def run(self, left):
        return ray.get(self.following.run.remote(left - 1)) if left else 0


A, B, C = (ray.remote(num_cpus=0)(type(name, (Ring,), {})) for name in "ABC")
ray.init()
ring = [A.remote(), B.remote(), C.remote()]
ray.get([one.meet.remote(ring[(place + 1) % 3]) for place, one in enumerate(ring)])
print("MARK", flush=True)
ray.get(ring[0].run.remote(5))
