"""Requests to an ASGI application in this process."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode


@dataclass
class Answered:
    """An answer. headers: by name in small letters."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)


def request(
    app: Any, path: str, headers: dict[str, str] | None = None, method: str = "GET", body: bytes = b"", **params: Any
) -> Answered:
    """Send one request to an application and return its answer; its host is localhost unless `headers` name one."""
    given = {"host": "localhost:8265", **(headers or {})}
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
        "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": urlencode(params).encode(),
        "headers": [(name.encode(), text.encode()) for name, text in given.items()],
    }  # fmt: skip
    sent: list[dict[str, Any]] = []

    received = iter([True])

    async def receive() -> dict[str, Any]:
        if not next(received, False):
            await asyncio.Event().wait()  # the client neither sends more nor goes
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    begin = sent[0]
    found = {name.decode(): text.decode() for name, text in begin["headers"]}
    return Answered(begin["status"], found, b"".join(message.get("body", b"") for message in sent[1:]))
