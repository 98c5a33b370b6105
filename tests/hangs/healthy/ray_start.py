"""A cluster of `ray start` in which a call hangs that its program has left there.

kind: healthy
cause: Another program may come.
start: python
"""

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

os.environ["HPCRAY_START_DIR"] = place = tempfile.mkdtemp()
RAY = [sys.executable, "-m", "hpcray.cli.ray"]
PROGRAM = """
import threading
import hpcray as ray
@ray.remote(num_cpus=0)
class Keeper:
    def hang(self):
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    def ready(self):
        return True
ray.init(address="auto")
keeper = Keeper.options(name="keeper", lifetime="detached", max_concurrency=2).remote()
keeper.hang.remote()
ray.get(keeper.ready.remote())
"""


def end():
    subprocess.run([*RAY, "stop", "--force"], check=False, stdout=subprocess.DEVNULL)
    shutil.rmtree(place, ignore_errors=True)


atexit.register(end)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
subprocess.run([*RAY, "start", "--head"], check=True, stdout=subprocess.DEVNULL)
subprocess.run([sys.executable, "-c", PROGRAM], check=True)
print("MARK", flush=True)
while subprocess.run([*RAY, "status"], check=False, capture_output=True).returncode == 0:
    time.sleep(5)
sys.exit("the cluster has ended")
