"""Serve: what its ports say to another user of the machine, and to a call without the job's token. Needs root."""

import json
import multiprocessing
import os
import socket

import grpc
import ray
import requests
from ray import serve
from ray.serve.generated import serve_pb2, serve_pb2_grpc

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


def listening() -> dict[int, set[str]]:
    """Ports on which processes of this machine listen, with the addresses."""
    found: dict[int, set[str]] = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with open(f"/proc/net/{name}") as file:
            for line in file.readlines()[1:]:
                address, state = line.split()[1], line.split()[3]
                if state == "0A":
                    words = bytes.fromhex(address.split(":")[0])
                    packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                    found.setdefault(int(address.split(":")[1], 16), set()).add(socket.inet_ntop(family, packed))
    return found


def main():
    before = set(listening())
    ray.init(num_cpus=4)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(http_options={"port": port})
    serve.run(Open.bind(), name="open", route_prefix="/")
    now = {number: addresses for number, addresses in listening().items() if number not in before}
    found = {"http": sorted(now.pop(port)), "everywhere": [n for n, where in now.items() if where & {"0.0.0.0", "::"}]}
    found["own"] = requests.get(f"http://127.0.0.1:{port}/").text
    found["stranger"] = as_stranger(ask, port)
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
    found["grpc"] = sorted(codes - {"UNAVAILABLE", "DEADLINE_EXCEEDED"})  # ports of others
    serve.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
