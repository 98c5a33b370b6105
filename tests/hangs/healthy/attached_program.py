"""A program beside which another one is attached.

kind: healthy
cause: The other one may do anything next.
"""

import subprocess
import sys
import threading

import hpcray as ray

OTHER = "import threading; import hpcray as ray; ray.init(address='auto'); print('in', flush=True); input()"

ray.init()
with subprocess.Popen([sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
    assert other.stdout is not None and other.stdout.readline() == b"in\n"
    print("MARK", flush=True)
    threading.Event().wait()
