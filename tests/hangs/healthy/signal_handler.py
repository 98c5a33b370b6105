"""A program that ends when its handler of SIGTERM sets an event.

kind: healthy
cause: Another process sends the signal.
"""

import signal
import threading

import hpcray as ray

ray.init()
over = threading.Event()
signal.signal(signal.SIGTERM, lambda number, frame: over.set())
print("MARK", flush=True)
over.wait()
