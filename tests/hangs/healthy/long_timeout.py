"""A `get` with a long timeout.

kind: healthy
cause: It ends by itself.
"""

import threading

import hpcray as ray


@ray.remote
def f():
    threading.Event().wait()


ray.init()
ref = f.remote()
print("MARK", flush=True)
ray.get(ref, timeout=3600)
