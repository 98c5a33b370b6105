"""An async actor that serves connections.

kind: healthy
cause: Clients may come.
"""

import asyncio

import hpcray as ray


@ray.remote(num_cpus=0)
class Server:
    async def serve(self):
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        await server.serve_forever()


ray.init()
server = Server.remote()
call = server.serve.remote()
print("MARK", flush=True)
ray.get(call)
