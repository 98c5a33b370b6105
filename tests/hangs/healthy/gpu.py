"""A task that waits for a GPU which works.

kind: healthy
cause: Use of a GPU is progress. Here NVIDIA's library is made up.
run: --num-gpus 1
path: fake_nvml
"""

import threading

import hpcray as ray


@ray.remote(num_gpus=1)
def f():
    threading.Event().wait()


ray.init()
ref = f.remote()
print("MARK", flush=True)
ray.get(ref)
