"""A task that waits for a datagram.

kind: healthy
cause: Any process of any host may send one.
"""

import socket

import hpcray as ray


@ray.remote
def f():
    with socket.socket(type=socket.SOCK_DGRAM) as here:
        here.bind(("127.0.0.1", 0))
        return here.recv(1)


ray.init()
ref = f.remote()
print("MARK", flush=True)
ray.get(ref)
