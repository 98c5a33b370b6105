"""A generator that never yields its next value.

kind: likely
cause: Between two values it waits for an event that is never set.
remedy: Wait with a timeout, or end the generator.
names: items
"""

import threading

import hpcray as ray


@ray.remote
def items():
    yield 1
    threading.Event().wait()
    yield 2


ray.init()
found = items.remote()
assert ray.get(next(found)) == 1
print("MARK", flush=True)
next(found)
