"""A task that sleeps.

kind: healthy
cause: The sleep ends by itself.
"""

import time

import hpcray as ray

ray.init()
ref = ray.remote(lambda: time.sleep(3600)).remote()
print("MARK", flush=True)
ray.get(ref)
