"""A notebook in which no cell runs, beside a call that hangs.

kind: healthy
cause: A user may run the next cell.
start: python
needs: jupyter_client ipykernel
"""

import signal
import sys
import time

from jupyter_client.manager import start_new_kernel

CELL = """
import threading
import hpcray as ray
ray.init()
@ray.remote
def f():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
ref = f.remote()
"""
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
manager, client = start_new_kernel(kernel_name="python3")
try:
    reply = client.execute_interactive(CELL, timeout=60)
    assert reply["content"]["status"] == "ok", reply
    print("MARK", flush=True)
    while manager.is_alive():
        time.sleep(0.5)
    sys.exit("the kernel has ended")
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
