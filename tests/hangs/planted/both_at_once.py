"""Two calls that the program starts at once, each of which needs the other actor.

kind: certain
cause: A.swap waits for B.give, which is queued behind B.swap, which waits for A.give.
remedy: Fetch both values in the program and pass them as arguments.
names: A.swap
"""

import hpcray as ray


class Side:
    def meet(self, other):
        self.other = other

    def swap(self):
        return ray.get(self.other.give.remote())

    def give(self):
        return 1


A, B = (ray.remote(num_cpus=0)(type(name, (Side,), {})) for name in "AB")
ray.init()
a, b = A.remote(), B.remote()
ray.get([a.meet.remote(b), b.meet.remote(a)])
ray.get([a.give.remote(), b.give.remote()])
print("MARK", flush=True)
ray.get([a.swap.remote(), b.swap.remote()])
