"""A program that is over, but for a thread that waits for ever.

kind: likely
cause: Python waits for threads that are no daemons before it ends.
remedy: daemon=True, or set the event.
names: the program
"""

import threading

import hpcray as ray

ray.init()
threading.Thread(target=threading.Event().wait).start()
print("MARK", flush=True)
