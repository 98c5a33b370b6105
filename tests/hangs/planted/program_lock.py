"""A program that waits for a lock of its own.

kind: likely
cause: A thread has ended with the lock in its hands.
remedy: with lock:
names: the program
"""

import threading

import hpcray as ray

ray.init()
lock = threading.Lock()
thread = threading.Thread(target=lock.acquire)
thread.start()
thread.join()
print("MARK", flush=True)
lock.acquire()
