"""A program that looks for a file again and again.

kind: healthy
cause: Another job may write it.
"""

import os
import time

import hpcray as ray

ray.init()
print("MARK", flush=True)
while not os.path.exists("/nowhere/at/all"):
    time.sleep(2)
