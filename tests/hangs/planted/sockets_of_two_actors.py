"""Two actors with a connection between them, each of which waits for the other to begin.

kind: likely
cause: Both read first.
remedy: A protocol in which one side writes first; or timeouts of the sockets.
names: Client.talk
"""

import socket

import hpcray as ray


@ray.remote
class Server:
    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))

    def port(self):
        return self.listener.getsockname()[1]

    def talk(self):
        with self.listener:
            peer, _ = self.listener.accept()
        return peer.recv(1)


@ray.remote
class Client:
    def talk(self, port):
        return socket.create_connection(("127.0.0.1", port)).recv(1)


ray.init()
server, client = Server.remote(), Client.remote()
port = ray.get(server.port.remote())
refs = [server.talk.remote(), client.talk.remote(port)]
print("MARK", flush=True)
ray.get(refs)
