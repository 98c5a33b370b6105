"""A program that asks for input.

kind: healthy
cause: A user may type.
input: open
"""

import hpcray as ray

ray.init()
print("MARK", flush=True)
input()
