"""A call every few seconds.

kind: healthy
cause: Calls that begin and end are progress.
"""

import threading

import hpcray as ray


@ray.remote(num_cpus=0)
class A:
    def f(self):
        return 1


ray.init()
a = A.remote()
done = threading.Event()


def work():
    while True:
        ray.get(a.f.remote())
        done.wait(7)


threading.Thread(target=work, daemon=True).start()
print("MARK", flush=True)
threading.Event().wait()
