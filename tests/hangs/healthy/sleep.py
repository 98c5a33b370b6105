"""A program that sleeps.

kind: healthy
cause: The sleep ends by itself.
"""

import time

import hpcray as ray

ray.init()
print("MARK", flush=True)
time.sleep(3600)
