"""A program that waits for a signal.

kind: healthy
cause: Another process sends it.
"""

import signal

import hpcray as ray

ray.init()
print("MARK", flush=True)
signal.pause()
