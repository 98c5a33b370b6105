"""Two actors on two nodes that call each other and wait.

kind: certain
cause: A.f waits for B.f, and B.f for a second call of A.f.
remedy: Let the program call one after the other.
names: A.f
run: -n 2
"""

import hpcray as ray


class Side:
    def meet(self, other):
        self.other = other

    def f(self, left):
        return ray.get(self.other.f.remote(left - 1)) if left else 0


A, B = (ray.remote(num_cpus=0)(type(name, (Side,), {})) for name in "AB")
ray.init()
a, b = (kind.options(scheduling_strategy="SPREAD").remote() for kind in (A, B))
ray.get([a.meet.remote(b), b.meet.remote(a)])
print("MARK", flush=True)
ray.get(a.f.remote(4))
