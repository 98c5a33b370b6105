"""Serve on hpcray: HTTP at a Unix socket, and HTTP that asks for a token."""

import contextlib
import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import ray
import yaml
from click.testing import CliRunner
from fastapi import FastAPI, WebSocket
from ray import serve
from ray.serve.scripts import cli
from ray.util.state import list_actors
from serve_ports import as_stranger, listening
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect, unix_connect

api = FastAPI()


@serve.deployment
@serve.ingress(api)
class Api:
    @api.post("/size")
    async def size(self, text: str) -> int:
        return len(text)

    @api.websocket("/echo")
    async def echo(self, socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text((await socket.receive_text())[::-1])
        await socket.close()


def mode(path: str) -> str:
    return oct(stat.S_IMODE(os.stat(path).st_mode))


@contextlib.contextmanager
def opened(path: str) -> Iterator[None]:
    """Let all users have a socket, and enter the directories that it lies in."""
    before = {str(where): stat.S_IMODE(where.stat().st_mode) for where in (Path(path), *Path(path).parents)}
    for where, bits in before.items():
        os.chmod(where, bits | 0o777 if where == path else bits | 0o055)
    try:
        yield
    finally:
        for where, bits in before.items():
            os.chmod(where, bits)


def ask_socket(path: str) -> str:
    """What another user gets who knows the path."""
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=path)) as client:
            return client.get("http://x/-/healthz").text
    except httpx.ConnectError:
        return "ConnectError"
    except httpx.TransportError:  # closed before or while the request was written
        return "closed"


def ask_port(port: int, headers: dict[str, str]) -> tuple[int, str]:
    answer = httpx.get(f"http://127.0.0.1:{port}/-/healthz", headers=headers)
    return answer.status_code, answer.text


def status() -> dict:
    done = CliRunner().invoke(cli, ["status"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return yaml.safe_load(done.stdout)


def ports() -> set[int]:
    return set(listening([actor.pid for actor in list_actors(filters=[("state", "=", "ALIVE")], detail=True)]))


def unix(session: str) -> dict:
    path = f"{session}/http-8000.s"
    serve.start(http_options={"host": "unix", "root_path": "/root"})
    serve.run(Api.bind(), name="api", route_prefix="/api")
    with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://serve") as client:
        found = {"healthy": client.get("/-/healthz").text}
        found["size"] = client.post("/api/size", params={"text": "x" * 1000}).json()
        found["missing"] = client.get("/nothing").status_code
        begun = time.monotonic()
        for _ in range(20):
            client.get("/-/healthz")
        found["quick"] = time.monotonic() - begun < 0.6
    with unix_connect(path, uri="ws://serve/api/echo") as connection:
        connection.send("abc")
        found["echo"] = connection.recv()
    found["modes"] = mode(path), mode(session)
    found["stranger"] = as_stranger(ask_socket, path)
    with opened(path):
        found["stranger inside"] = as_stranger(ask_socket, path)
    found["port"] = 8000 in ports()
    found["status"] = list(status()["http"].values()) == [f"the Unix socket {path}"]
    serve.shutdown()
    found["closed"] = ask_socket(path)
    serve.start(http_options={"host": "unix"})
    serve.run(Api.bind(), name="api", route_prefix="/api")
    found["again"] = ask_socket(path)
    serve.shutdown()
    return found


def token(session: str, port: int) -> dict:
    path = f"{session}/http-{port}.token"
    serve.start(http_options={"port": port, "token": True})
    serve.run(Api.bind(), name="api", route_prefix="/api")
    with open(path) as file:
        line = file.read()
    name, _, secret = line.strip().partition(": ")
    found = {"name": name, "long": len(secret), "mode": mode(path)}
    wrong = secret[:-1] + ("0" if secret[-1] != "0" else "1")
    for what, headers in {
        "none": {}, "wrong": {name: wrong}, "short": {name: secret[:-1]}, "empty": {name: ""},
        "right": {name: secret}, "bearer": {"Authorization": f"Bearer {secret}"}, "odd": {name: "\u00e9"},
        "the application's": {"Authorization": "Basic eA==", name: secret},
    }.items():  # fmt: skip
        found[what] = ask_port(port, {key: value.encode("latin-1") for key, value in headers.items()})[0]
    found["stranger"] = [as_stranger(ask_port, port, headers)[0] for headers in ({}, {name: secret})]
    url = f"ws://127.0.0.1:{port}/api/echo"
    with contextlib.suppress(InvalidStatus), connect(url):
        found["let in"] = True
    with connect(url, additional_headers={name: secret}) as connection:
        connection.send("abc")
        found["echo"] = connection.recv()
    found["status"] = [path in place for place in status()["http"].values()]
    serve.shutdown()
    return found


def main():
    context = ray.init(num_cpus=4)
    session = context.address_info["session_dir"]
    found = {"unix": unix(session), "token": token(session, 8123)}
    serve.start(http_options={"port": 8123})
    found["plain"] = "http" not in status(), ask_port(8123, {})[0] != 401
    found["session"] = session
    serve.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
