"""A task that waits for ssh.

kind: healthy
cause: Another machine works for it. Here a stand-in has its name.
"""

import os
import shutil
import subprocess
import sys
import tempfile

import hpcray as ray


@ray.remote
def f(place):
    code = "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()"
    name = os.path.join(place, "ssh")
    os.symlink(sys.executable, name)
    with open(os.path.join(place, "name.py"), "w") as file:
        file.write(f"open('/proc/self/comm', 'w').write('ssh')\n{code}\n")
    return subprocess.run([sys.executable, os.path.join(place, "name.py")], check=False).returncode


ray.init()
place = tempfile.mkdtemp()
ref = f.remote(place)
print("MARK", flush=True)
try:
    ray.get(ref)
finally:
    shutil.rmtree(place)
