"""Serve over HTTP: requests, FastAPI, streams, websockets, errors, time limits, back-pressure, several applications."""

import asyncio
import concurrent.futures
import json
import socket
import time

import ray
import requests
from fastapi import FastAPI, HTTPException, WebSocket
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

api = FastAPI()


@serve.deployment(max_ongoing_requests=20)
@serve.ingress(api)
class Api:
    def __init__(self) -> None:
        self.items: dict[int, str] = {}

    @api.get("/items/{number}")
    def read(self, number: int) -> dict[str, str]:
        if number not in self.items:
            raise HTTPException(status_code=404, detail="no such item")
        return {"item": self.items[number]}

    @api.put("/items/{number}")
    async def write(self, number: int, text: str) -> int:
        self.items[number] = text
        return len(self.items)

    @api.get("/numbers")
    def numbers(self, count: int) -> StreamingResponse:
        async def produce():
            for index in range(count):
                yield f"{index}\n"
                await asyncio.sleep(0.01)

        return StreamingResponse(produce(), media_type="text/plain")

    @api.websocket("/echo")
    async def echo(self, socket: WebSocket) -> None:
        await socket.accept()
        while True:
            text = await socket.receive_text()
            if text == "end":
                break
            await socket.send_text(text[::-1])
        await socket.close()


@serve.deployment
class Plain:
    async def __call__(self, request: Request):
        if request.query_params.get("fail"):
            raise RuntimeError("as asked")
        return {"method": request.method, "path": request.url.path, "body": (await request.body()).decode()}


@serve.deployment(max_ongoing_requests=1, max_queued_requests=1)
class Narrow:
    async def __call__(self) -> str:
        await asyncio.sleep(2)
        return "through"


def websocket(port: int, words: list[str]) -> list[str]:
    from websockets.sync.client import connect

    with connect(f"ws://127.0.0.1:{port}/api/echo") as connection:
        answers = []
        for word in words:
            connection.send(word)
            answers.append(connection.recv())
        connection.send("end")
        return answers


def main():
    ray.init(num_cpus=6)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(http_options={"port": port, "request_timeout_s": 5})
    serve.run(Api.bind(), name="api", route_prefix="/api")
    serve.run(Plain.bind(), name="plain", route_prefix="/plain")
    serve.run(Narrow.bind(), name="narrow", route_prefix="/narrow")
    base = f"http://127.0.0.1:{port}"
    with requests.Session() as session:
        found = {"routes": session.get(f"{base}/-/routes").json(), "healthy": session.get(f"{base}/-/healthz").text}
        found["missing"] = session.get(f"{base}/api/items/1").status_code
        found["written"] = session.put(f"{base}/api/items/1", params={"text": "a"}).json()
        found["read"] = session.get(f"{base}/api/items/1").json()
        found["invalid"] = session.get(f"{base}/api/items/x").status_code
        with session.get(f"{base}/api/numbers", params={"count": 5}, stream=True) as response:
            found["lines"] = [line.decode() for line in response.iter_lines()]
        found["echo"] = websocket(port, ["abc", "de"])
        found["plain"] = session.post(f"{base}/plain/x?y=1", data="hello").json()
        found["failed"] = session.get(f"{base}/plain", params={"fail": "1"}).status_code
        found["nowhere"] = session.get(f"{base}/nothing").status_code
        big = "x" * 3_000_000
        found["big"] = len(session.post(f"{base}/plain", data=big).json()["body"])
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        codes = list(pool.map(lambda _: requests.get(f"{base}/narrow").status_code, range(6)))
    found["narrow"] = sorted(set(codes)), codes.count(200) >= 1
    serve.shutdown()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                found["closed"] = True
                break
        time.sleep(0.1)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
