"""An actor that reads a generator of its own.

kind: certain
cause: A.f waits for the first value of A.items, which A runs only after A.f.
remedy: Call the method directly: for item in self.items().
names: A.items
"""

import hpcray as ray


@ray.remote
class A:
    def f(self, me):
        return [ray.get(ref) for ref in me.items.options(num_returns="streaming").remote()]

    def items(self):
        yield 1


ray.init()
a = A.remote()
ref = a.f.remote(a)
print("MARK", flush=True)
ray.get(ref)
