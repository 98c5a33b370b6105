"""A task in a wait that the kernel does not interrupt, as for a file server.

kind: healthy
cause: The server will answer. Here a process waits for a child of vfork, in the same state (D).
"""

import ctypes
import mmap
import platform
import struct
import time

import hpcray as ray

CODE = bytes.fromhex(
    "b83a0000000f05"  # vfork()
    "85c07519"  # the parent goes to the last line
    "b823000000488d3d1100000031f60f05"  # the child: nanosleep() with the time behind the code
    "b83c00000031ff0f05"  # the child: exit(0)
    "c3909090"
)


def wait_in_the_kernel(seconds):
    if platform.machine() != "x86_64":
        time.sleep(seconds)
        return
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(CODE + struct.pack("qq", seconds, 0))
    ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()


@ray.remote
def f():
    wait_in_the_kernel(3600)


ray.init()
ref = f.remote()
print("MARK", flush=True)
ray.get(ref)
