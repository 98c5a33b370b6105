"""Who may use Ray's REST API: the token, names of the server, pages of browsers; and packages that clients upload."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from helpers.asgi import Answered, request

from hpcray.platform.private_files import UntrustedPathError
from hpcray.ray_api.app import PackageTooLargeError, UploadedPackages
from hpcray.ray_api.server import ApiAddress, Gate, TokenError, api_token

TOKEN = "0123456789abcdef" * 2
SHOWN = {"authorization": f"Bearer {TOKEN}"}


async def behind(scope: Any, receive: Any, send: Any) -> None:
    """What is behind the gate: it reads the body and answers with its length."""
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d" % len(message["body"])})


async def unread() -> None:
    raise AssertionError("the body of a request that is refused was read")


def ask(headers: dict[str, str], names: tuple[str, ...] = ()) -> Answered:
    return request(Gate(behind, TOKEN, names), "/api/jobs/", headers, "POST", b"body")


@pytest.mark.parametrize("header", ["authorization", "x-ray-authorization"])
def test_the_token_opens(header: str) -> None:
    assert ask({header: f"Bearer {TOKEN}"}).body == b"4"


@pytest.mark.parametrize(
    ("headers", "status", "text"),
    [
        ({}, 401, "Missing"),
        ({"authorization": ""}, 401, "Missing"),
        ({"authorization": TOKEN}, 403, "Invalid"),
        ({"authorization": "Bearer "}, 403, "Invalid"),
        ({"authorization": f"Bearer {TOKEN[:-1]}"}, 403, "Invalid"),
        ({"authorization": f"Bearer {TOKEN}x"}, 403, "Invalid"),
        ({"authorization": f"Basic {TOKEN}"}, 403, "Invalid"),
        ({"authorization": "Bearer \u00ff\u00fe"}, 403, "Invalid"),
        ({"cookie": f"ray-authentication-token={TOKEN}"}, 401, "Missing"),
        ({**SHOWN, "host": "evil.example:8265"}, 403, "no name of this server"),
        ({**SHOWN, "host": "127.0.0.1.evil.example"}, 403, "no name of this server"),
        ({**SHOWN, "host": ""}, 403, "no name of this server"),
        ({**SHOWN, "host": "n1:8265"}, 403, "no name of this server"),
        ({**SHOWN, "origin": "http://localhost:8265"}, 403, "browsers"),
        ({**SHOWN, "origin": "null"}, 403, "browsers"),
        ({**SHOWN, "sec-fetch-site": "cross-site"}, 403, "browsers"),
        ({**SHOWN, "sec-fetch-site": "same-origin"}, 403, "browsers"),
    ],
)
def test_all_else_is_refused(headers: dict[str, str], status: int, text: str) -> None:
    said = ask(headers)
    assert (said.status, text in said.body.decode()) == (status, True)
    assert said.headers["connection"] == "close"


def test_a_refusal_comes_before_the_body_is_read() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    for headers in ([], [(b"host", b"localhost"), (b"authorization", b"Bearer no")]):
        scope = {"type": "http", "method": "PUT", "path": "/", "headers": headers}
        asyncio.run(Gate(behind, TOKEN)(scope, unread, send))  # type: ignore[arg-type]
    assert [message["status"] for message in sent if "status" in message] == [403, 403]


def test_a_websocket_needs_the_token_too() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def opened(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})

    for headers in ({}, SHOWN, {**SHOWN, "origin": "http://localhost"}):
        pairs = [(name.encode(), text.encode()) for name, text in {"host": "localhost", **headers}.items()]
        scope = {"type": "websocket", "path": "/", "headers": pairs, "extensions": {"websocket.http.response": {}}}
        asyncio.run(Gate(opened, TOKEN)(scope, receive, send))
    starts = [message.get("status", message["type"]) for message in sent if "body" not in message]
    assert starts == [401, "websocket.accept", 403]


def test_a_server_on_another_address_has_further_names() -> None:
    names = ("10.0.0.1", "n1", "[fd00::1]")
    for host in ("10.0.0.1:8265", "N1", "[fd00::1]:8265", "localhost:1", "127.0.0.1"):
        assert ask({**SHOWN, "host": host}, names).status == 200, host
    for host in ("10.0.0.2:8265", "fd00::1", "n1.evil.example"):
        assert ask({**SHOWN, "host": host}, names).status == 403, host


# ---------------------------------------------------------------- the token


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HPCRAY_SAFE_DIRECTORIES", str(tmp_path))
    return home


def test_a_token_is_made_where_there_is_none(home: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    first, second = api_token({}, str(tmp_path / "1")), api_token({}, str(tmp_path / "2"))
    assert first.is_new and len(first.value) == 64 and first.value != second.value
    assert os.stat(second.path).st_mode & 0o777 == 0o600 and Path(second.path).read_text() == second.value
    assert second.exports() == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": second.path}
    assert not (home / ".ray").exists()  # which would change what the real Ray does


def test_the_token_that_clients_send_is_used(home: Path, tmp_path: Path) -> None:
    (home / ".ray").mkdir(mode=0o700)
    named, usual = tmp_path / "named", home / ".ray" / "auth_token"
    for path in (named, usual):
        path.write_text(f"{path.name * 20}\n")
        path.chmod(0o600)
    assert api_token({}, "/nowhere").value == usual.name * 20
    assert api_token({"RAY_AUTH_TOKEN_PATH": str(named)}, "/nowhere").value == named.name * 20
    by_variable = api_token({"RAY_AUTH_TOKEN": TOKEN, "RAY_AUTH_TOKEN_PATH": str(named)}, "/nowhere")
    assert (by_variable.value, by_variable.exports()) == (TOKEN, {"RAY_AUTH_MODE": "token"})


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660])
def test_a_token_that_others_can_read_is_refused(home: Path, tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(mode)
    with pytest.raises(UntrustedPathError, match="hint: "):
        api_token({"RAY_AUTH_TOKEN_PATH": str(path)}, "/nowhere")


@pytest.mark.parametrize("text", ["", "short", "has a space in it, and more", "line\nline line line line"])
def test_what_is_no_secret_is_refused(home: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(TokenError, match="hint: "):
        api_token({"RAY_AUTH_TOKEN_PATH": str(path)}, "/nowhere")


def test_a_file_that_is_named_has_to_be_there(home: Path) -> None:
    with pytest.raises(FileNotFoundError):
        api_token({"RAY_AUTH_TOKEN_PATH": "/no/such/file"}, "/nowhere")


# ---------------------------------------------------------------- packages


def take(packages: UploadedPackages, name: str, *pieces: bytes) -> None:
    async def come() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    asyncio.run(packages.take("gcs", name, come()))


def test_packages_are_there_whole_or_not_at_all(tmp_path: Path) -> None:
    packages = UploadedPackages(str(tmp_path / "p"), largest=10)
    assert not packages.has("gcs", "_ray_pkg_1.zip")
    take(packages, "_ray_pkg_1.zip", b"12345", b"67890")
    assert packages.has("gcs", "_ray_pkg_1.zip")
    with pytest.raises(PackageTooLargeError):
        take(packages, "_ray_pkg_2.zip", b"12345", b"678901")
    assert os.listdir(tmp_path / "p") == ["_ray_pkg_1.zip"]
    env = {"working_dir": "gcs://_ray_pkg_1.zip", "py_modules": ["gcs://_ray_pkg_1.zip", "/a/path"], "pip": ["x"]}
    path = packages.path_of("gcs", "_ray_pkg_1.zip")
    assert packages.local(env) == {"working_dir": path, "py_modules": [path, "/a/path"], "pip": ["x"]}
    assert env["working_dir"] == "gcs://_ray_pkg_1.zip" and packages.local(None) is None
    with pytest.raises(ValueError, match="upload it"):
        packages.local({"working_dir": "gcs://_ray_pkg_2.zip"})
    packages.close()
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("name", ["../x.zip", "a/b.zip", ".zip", ".hidden.zip", "x.new", "x.zip.new", "", "x" * 300])
def test_names_that_lead_elsewhere_are_none(tmp_path: Path, name: str) -> None:
    packages = UploadedPackages(str(tmp_path / "p"))
    with pytest.raises(ValueError, match="no package"):
        packages.has("gcs", name)
    with pytest.raises(ValueError, match="no package"):
        packages.has("s3", "x.zip")


def test_those_used_longest_ago_make_room(tmp_path: Path) -> None:
    packages = UploadedPackages(str(tmp_path / "p"), largest=10, most=25)
    for number in range(3):
        take(packages, f"{number}.zip", b"0123456789")
        os.utime(tmp_path / "p" / f"{number}.zip", (number, number))
    assert packages.has("gcs", "1.zip")  # and was used just now
    take(packages, "3.zip", b"0123456789")
    assert sorted(os.listdir(tmp_path / "p")) == ["1.zip", "3.zip"]


# ---------------------------------------------------------------- the place


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "203.0.113.9", "no-such-host.invalid"])
def test_all_addresses_at_once_and_those_of_others_are_refused(host: str) -> None:
    with pytest.raises(ValueError, match="not one address of this host"):
        ApiAddress(host, 0).listen()


def test_loopback_has_no_further_names() -> None:
    place = ApiAddress(port=0)
    with place.listen() as sock:
        assert sock.getsockname()[0] == "127.0.0.1" and not place.names(sock)
        assert place.url(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
