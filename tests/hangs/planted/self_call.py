"""An actor that calls itself and waits.

kind: certain
cause: A.f waits for A.g, which A runs only after A.f.
remedy: Call the method directly: self.g().
names: A.g
"""

import hpcray as ray


@ray.remote(num_cpus=0)
class A:
    def meet(self, me):
        self.me = me

    def f(self):
        return ray.get(self.me.g.remote())

    def g(self):
        return 1


ray.init()
a = A.remote()
ray.get(a.meet.remote(a))
print("MARK", flush=True)
ray.get(a.f.remote())
