"""A task that waits for an event that is never set.

kind: likely
cause: The thread that should set the event has ended with an error.
remedy: Wait with a timeout, or join the thread.
names: f
"""

import threading

import hpcray as ray


@ray.remote
def f():
    threading.Event().wait()


ray.init()
print("MARK", flush=True)
ray.get(f.remote())
