"""A task that waits for a child process which sleeps.

kind: healthy
cause: The child ends by itself.
"""

import subprocess

import hpcray as ray

ray.init()
ref = ray.remote(lambda: subprocess.run(["sleep", "3600"], check=False).returncode).remote()
print("MARK", flush=True)
ray.get(ref)
