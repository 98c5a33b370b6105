"""A program that asks for input.

kind: healthy
cause: A user may type.
"""

import os

import hpcray as ray

ray.init()
read, write = os.pipe()
os.dup2(read, 0)
print("MARK", flush=True)
input()
