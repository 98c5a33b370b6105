"""A thread that waits for a thread which waits for it.

kind: likely
cause: Each of the two joins the other one.
remedy: Join from one side.
names: f
"""

import threading

import hpcray as ray


@ray.remote
def f():
    main = threading.main_thread()
    other = threading.Thread(target=main.join)
    other.start()
    other.join()


ray.init()
print("MARK", flush=True)
ray.get(f.remote())
