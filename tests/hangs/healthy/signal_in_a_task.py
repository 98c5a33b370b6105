"""A task that ends when its handler of a signal sets an event.

kind: healthy
cause: Another process sends the signal.
"""

import signal
import threading

import hpcray as ray


@ray.remote
def f():
    event = threading.Event()
    signal.signal(signal.SIGUSR1, lambda number, frame: event.set())
    event.wait()


ray.init()
ref = f.remote()
print("MARK", flush=True)
ray.get(ref)
