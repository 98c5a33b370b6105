"""A task that waits for the answer of a server on this host, which is no part of the job.

kind: healthy
cause: The server works for it. Here it is a process that has left the program, and ends with it.
start: python
"""

import socket
import subprocess
import sys

import hpcray as ray

SERVER = """
import os, select, socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
if os.fork():
    os._exit(0)
os.setsid()
os.close(1)
peers = [server.accept()[0] for _ in range(2)]
select.select(peers, [], [])
"""
done = subprocess.run([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True, check=True)
address = "127.0.0.1", int(done.stdout)
here = socket.create_connection(address)  # the server ends when the program does


@ray.remote
def ask():
    return socket.create_connection(address).recv(1)


ray.init(address="local")
ref = ask.remote()
print("MARK", flush=True)
ray.get(ref)
