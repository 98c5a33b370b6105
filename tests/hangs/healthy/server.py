"""A program that serves connections.

kind: healthy
cause: Clients may come.
"""

import socket

import hpcray as ray

ray.init()
server = socket.create_server(("127.0.0.1", 0))
print("MARK", flush=True)
server.accept()
