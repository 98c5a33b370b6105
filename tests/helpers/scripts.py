"""The programs that the tests of starting and leaving run."""

from __future__ import annotations

from pathlib import Path

# Occupies a worker, an actor, a worker's child process and the object store; says "ready"; ends as it is told.
BUSY = """\
import os, signal, subprocess, sys, time
import numpy as np
import hpcray as ray


@ray.remote
def sleep_with_a_child(seconds):
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    time.sleep(seconds)
    return child.pid


@ray.remote
class Counter:
    def __init__(self):
        self.block = ray.put(np.ones(1_000_000))

    def pid(self):
        return os.getpid()


def main(how):
    ray.init(num_cpus=2) if "HPCRAY_ADDRESS" not in os.environ else ray.init()
    block = ray.put(np.zeros(1_000_000))
    counter = Counter.options(num_cpus=0).remote()
    pid = ray.get(counter.pid.remote())
    busy = [sleep_with_a_child.remote(600) for _ in range(2)]
    ray.wait(busy, timeout=0.5)
    print("ready", os.getpid(), pid, flush=True)
    if how == "normal":
        return
    if how == "raise":
        raise ValueError("as the test wants it")
    if how.startswith("exit"):
        sys.exit(int(how[4:]))
    ray.get(busy)


main(sys.argv[1])
"""

# One node with an idle worker, until stdin ends or it is killed.
IDLE = """\
import os, time
import hpcray as ray
ray.init()
pid = ray.get(ray.remote(os.getpid).remote())
print("ready", os.getpid(), pid, flush=True)
time.sleep(600)
"""

# Counts its KeyboardInterrupts for a second after the first one.
COUNTING = """\
import sys, time
import hpcray as ray
ray.init()
interrupts = 0
end = time.monotonic() + 60
while time.monotonic() < end:
    try:
        if not interrupts:
            print("ready", flush=True)
        ray.get(ray.remote(time.sleep).remote(max(0.0, end - time.monotonic())))
    except KeyboardInterrupt:
        interrupts += 1
        end = min(end, time.monotonic() + 1)
print("interrupts", interrupts, flush=True)
sys.exit(5)
"""


def write(directory: Path, text: str, name: str = "program.py") -> Path:
    """A script file in `directory`."""
    path = directory / name
    path.write_text(text)
    return path
