"""A task that waits and says that it is alive.

kind: healthy
cause: hpcray.alive() is progress.
"""

import threading

import hpcray as ray


@ray.remote
def f():
    done = threading.Event()

    def speak():
        while True:
            ray.alive()
            done.wait(4)

    threading.Thread(target=speak, daemon=True).start()
    threading.Lock().acquire()
    done.wait()


ray.init()
ref = f.remote()
print("MARK", flush=True)
ray.get(ref)
