"""A consumer of an empty `hpcray.util.queue.Queue`.

kind: certain
cause: Nothing is put into the queue any more.
remedy: A sentinel, or get(timeout=...).
names: _QueueActor.get
"""

import hpcray as ray
from hpcray.util.queue import Queue

ray.init()
queue = Queue()
queue.put(1)
queue.get()
print("MARK", flush=True)
queue.get()
