"""A task whose process is stopped.

kind: healthy
cause: A user will let it go on.
"""

import os
import signal

import hpcray as ray


@ray.remote
def f():
    os.kill(os.getpid(), signal.SIGSTOP)
    return 1


ray.init()
ref = f.remote()
print("MARK", flush=True)
ray.get(ref)
