"""Serve: what its ports say to another user of the machine, and to a call without the job's token. Needs root."""

import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys

import grpc
import ray
import requests
from ray import serve
from ray.serve.generated import serve_pb2, serve_pb2_grpc
from ray.util.state import list_actors

STRANGER = 12345


@serve.deployment
class Open:
    def __call__(self) -> str:
        return "hello"


def as_stranger(function, *args):
    """What a function returns in a process of another user."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def run() -> None:
        os.setresgid(STRANGER, STRANGER, STRANGER)
        os.setresuid(STRANGER, STRANGER, STRANGER)
        there.send(function(*args))

    child = context.Process(target=run)
    child.start()
    assert here.poll(60)
    answer = here.recv()
    child.join()
    return answer


def ask(port: int) -> str:
    """The first bytes of an answer over HTTP."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 127.0.0.1\r\n\r\n")
            return sock.recv(15).decode()
    except ConnectionError:
        return ""


def ask_grpc(port: int, uid: int) -> str:
    """What becomes of a call of the gRPC proxy by a process of this user: gRPC does not work in forked ones."""
    code = f"""
import os, grpc
with grpc.insecure_channel("127.0.0.1:{port}") as channel:  # connects when it is used
    os.setresgid({uid}, {uid}, {uid})
    os.setresuid({uid}, {uid}, {uid})
    try:
        channel.unary_unary("/ray.serve.RayServeAPIService/Healthz")(b"", timeout=60)
        print("OK")
    except grpc.RpcError as error:
        print(error.code().name)
"""
    return subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def sockets(pids: list[int]) -> set[str]:
    """Inodes of the sockets that processes have."""
    found = set()
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    return found


def listening(pids: list[int]) -> dict[int, set[str]]:
    """Ports on which processes listen, with the addresses."""
    found: dict[int, set[str]] = {}
    inodes = sockets(pids)
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with open(f"/proc/net/{name}") as file:
            for words in map(str.split, file.readlines()[1:]):
                if words[3] == "0A" and words[9] in inodes:
                    host, _, port = words[1].partition(":")
                    packed = bytes.fromhex(host)
                    address = b"".join(packed[i : i + 4][::-1] for i in range(0, len(packed), 4))
                    found.setdefault(int(port, 16), set()).add(socket.inet_ntop(family, address))
    return found


def main():
    ray.init(num_cpus=4)
    with socket.socket() as probe, socket.socket() as another:
        probe.bind(("127.0.0.1", 0))
        another.bind(("127.0.0.1", 0))
        port, proxy = probe.getsockname()[1], another.getsockname()[1]
    functions = ["ray.serve.generated.serve_pb2_grpc.add_UserDefinedServiceServicer_to_server"]
    serve.start(http_options={"port": port}, grpc_options={"port": proxy, "grpc_servicer_functions": functions})
    serve.run(Open.bind(), name="open", route_prefix="/")
    now = listening([actor.pid for actor in list_actors(filters=[("state", "=", "ALIVE")], detail=True)])
    found = {"http": sorted(now.pop(port)), "everywhere": any(where & {"0.0.0.0", "::"} for where in now.values())}
    found["own"] = requests.get(f"http://127.0.0.1:{port}/").text
    found["stranger"] = as_stranger(ask, port)
    found["proxy"] = sorted(now.pop(proxy)), ask_grpc(proxy, STRANGER), ask_grpc(proxy, os.getuid())
    codes = set()
    for number, addresses in now.items():
        for address in addresses:
            with grpc.insecure_channel(f"{address.removeprefix('::ffff:')}:{number}") as channel:
                stub = serve_pb2_grpc.ASGIServiceStub(channel)
                request = serve_pb2.ASGIRequest(pickled_request_metadata=b"not a pickle")
                try:
                    stub.HandleRequest(request, timeout=5)
                except grpc.RpcError as error:
                    codes.add(error.code().name)
    found["grpc"] = sorted(codes)
    serve.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
