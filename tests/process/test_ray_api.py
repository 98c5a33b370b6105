"""`hpcray dashboard --ray-api` beside a cluster: Ray's REST API for jobs, and whom it refuses."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import PATIENCE, ROOT, eventually, hpcray_only, ray
from helpers.strangers import needs_stranger, stranger_says

from hpcray.platform.sockets import node_ip_address

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
wsproto = pytest.importorskip("wsproto")

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 2, "resources": {"mark": 1}}
RAY_PYTHON = os.environ.get("HPCRAY_TEST_RAY_PYTHON", "")
"""A Python that has the real Ray."""


class Api:
    """A server of the API. A context manager; at its end the server gets SIGINT.

    Attributes:
        environ: what it says that Ray's clients need. port: where it listens. token: that requests show.
    """

    def __init__(self, *options: str, **env: str) -> None:
        address = ray.init(ignore_reinit_error=True)["address"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "HOME": "/nonexistent", **env}
        line = [sys.executable, "-m", "hpcray.cli", "dashboard", "--job", address, "--port", "0", "--ray-api-port", "0"]
        line += options
        self.child = subprocess.Popen(
            line, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
        )
        self.said: list[str] = []
        assert self.child.stdout is not None and self.child.stderr is not None
        while not self.said or not self.said[-1].startswith("open, in one browser"):
            text = self.child.stdout.readline()
            assert text, self.child.stderr.read()
            self.said.append(text)
        exports = [text.split()[1].split("=", 1) for text in self.said if text.startswith("  export ")]
        self.environ = {name: value.strip("'") for name, value in exports}
        self.port = int(self.environ["RAY_API_SERVER_ADDRESS"].rpartition(":")[2])
        path = self.environ.get("RAY_AUTH_TOKEN_PATH")
        self.token = Path(path).read_text() if path else ""

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> str:
        """End the server. Returns what it has said on standard error."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGINT)
        _, err = self.child.communicate(timeout=PATIENCE)
        return err

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Send a request with the token; return the status, and the body, decoded where it is JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        given = {"Authorization": f"Bearer {self.token}", **{name.title(): text for name, text in headers.items()}}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(connection):
            connection.request(method, path, data, given)
            answer = connection.getresponse()
            text = answer.read()
        is_json = answer.headers.get_content_type() == "application/json"
        return answer.status, json.loads(text) if is_json else text.decode()

    def ended(self, job: str) -> dict[str, Any]:
        """Wait for the end of a job and return its row."""

        def terminal() -> Any:
            row = self.ask("GET", f"/api/jobs/{job}")[1]
            return row if row["status"] in ("SUCCEEDED", "FAILED", "STOPPED") else None

        return eventually(terminal, f"the end of {job}")

    def tail(self, job: str, **headers: str) -> tuple[int, str]:
        """What the WebSocket of a job's log sends, until the server closes it; and the status of the handshake."""
        from wsproto import ConnectionType, WSConnection
        from wsproto.events import AcceptConnection, CloseConnection, RejectConnection, Request, TextMessage

        client = WSConnection(ConnectionType.CLIENT)
        extra = {"Authorization": f"Bearer {self.token}", **headers}
        pairs = [(name.encode(), text.encode()) for name, text in extra.items()]
        status, texts = 0, []
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE) as sock:
            sock.sendall(
                client.send(Request(f"127.0.0.1:{self.port}", f"/api/jobs/{job}/logs/tail", extra_headers=pairs))
            )
            while data := sock.recv(1 << 16):
                client.receive_data(data)
                for event in client.events():
                    if isinstance(event, AcceptConnection):
                        status = 101
                    elif isinstance(event, RejectConnection):
                        return event.status_code, ""
                    elif isinstance(event, TextMessage):
                        texts.append(event.data)
                    elif isinstance(event, CloseConnection):
                        return status, "".join(texts)
        return status, "".join(texts)


@pytest.fixture(scope="module")
def api(request: pytest.FixtureRequest) -> Iterator[Api]:
    ray.init(**INIT, ignore_reinit_error=True)
    with Api("--ray-api") as made:
        yield made


def package() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr("program.py", "import os\nprint('in', os.listdir(), os.environ['WORD'])\n")
    return made.getvalue()


def test_a_job_with_a_package_from_submission_to_deletion(api: Api) -> None:
    name = "/api/packages/gcs/_ray_pkg_0123456789abcdef.zip"
    assert api.ask("GET", name)[0] == 404
    assert api.ask("PUT", name, package())[0] == 200 and api.ask("GET", name)[0] == 200
    env = {"working_dir": "gcs://_ray_pkg_0123456789abcdef.zip", "env_vars": {"WORD": "said"}}
    request = {"entrypoint": f"{sys.executable} program.py", "submission_id": "whole", "runtime_env": env}
    request |= {"metadata": {"k": "v"}, "entrypoint_num_cpus": 1, "entrypoint_memory": None}
    assert api.ask("POST", "/api/jobs/", request) == (200, {"job_id": "whole", "submission_id": "whole"})
    row = api.ended("whole")
    assert (row["status"], row["type"], row["metadata"]) == ("SUCCEEDED", "SUBMISSION", {"k": "v"})
    assert row["driver_exit_code"] == 0 and row["driver_node_id"] == ray.get_runtime_context().get_node_id()
    assert "in ['program.py'] said\n" in api.ask("GET", "/api/jobs/whole/logs")[1]["logs"]
    assert [one["submission_id"] for one in api.ask("GET", "/api/jobs/")[1] if one["submission_id"]] == ["whole"]
    assert api.ask("POST", "/api/jobs/whole/stop") == (200, {"stopped": False})
    assert api.ask("DELETE", "/api/jobs/whole") == (200, {"deleted": True})
    assert api.ask("GET", "/api/jobs/whole") == (404, "Job whole does not exist")


def test_a_job_is_stopped_and_its_log_is_followed_meanwhile(api: Api) -> None:
    request = {"entrypoint": "for i in 1 2 3; do echo line $i; done; exec sleep 600", "job_id": "long"}
    assert api.ask("POST", "/api/jobs", request)[1]["submission_id"] == "long"
    eventually(lambda: "line 3" in api.ask("GET", "/api/jobs/long/logs")[1]["logs"], "its lines")
    assert api.ask("POST", "/api/jobs/long/stop") == (200, {"stopped": True})
    status, text = api.tail("long")
    assert status == 101 and "line 1\nline 2\nline 3\n" in text
    assert api.ended("long")["status"] == "STOPPED"
    assert api.tail("nothing")[0] == 404


def test_requests_that_make_no_sense(api: Api) -> None:
    assert api.ask("POST", "/api/jobs/", {"entrypoint": 3}) == (
        400, "TypeError: entrypoint must be a string, got <class 'int'>",
    )  # fmt: skip
    for body in (b"no JSON", b"[]", {}, {"entrypoint": "x", "unknown": 1}, {"entrypoint": "x", "metadata": {"a": 1}}):
        assert api.ask("POST", "/api/jobs/", body)[0] == 400, body
    code, text = api.ask("POST", "/api/jobs/", {"entrypoint": "x", "runtime_env": {"working_dir": "gcs://_ray_9.zip"}})
    assert code == 400 and "upload it" in text
    assert api.ask("POST", "/api/jobs/", {"entrypoint": "true", "submission_id": "twice"})[0] == 200
    code, text = api.ask("POST", "/api/jobs/", {"entrypoint": "true", "submission_id": "twice"})
    assert code == 400 and "already exists" in text
    for method, path in (("GET", "x"), ("GET", "x/logs"), ("POST", "x/stop"), ("DELETE", "x")):
        assert api.ask(method, f"/api/jobs/{path}")[0] == 404
    assert api.ask("GET", "/api/packages/gcs/..%2f..%2fetc%2fx.zip")[0] in (400, 404)
    assert api.ask("PUT", "/api/packages/gcs/name-without-an-ending", b"")[0] == 400
    assert api.ask("GET", "/api/what")[0] == 404


def test_the_cluster_says_what_it_has(api: Api) -> None:
    version = api.ask("GET", "/api/version")[1]
    assert (version["version"], version["ray_version"]) == ("4", "2.60.0")
    text = api.ask("GET", "/api/cluster_status?format=1")[1]["data"]["clusterStatus"]
    node = ray.get_runtime_context().get_node_id()
    assert f" 1 node_{node}\n" in text and " 0.0/1.0 mark\n" in text
    said = api.ask("GET", "/api/cluster_status")[1]
    assert said["result"] and said["data"]["clusterStatus"]["loadMetricsReport"]["usage"]["mark"] == [0.0, 1.0]
    assert said["data"]["clusterStatus"]["autoscalerReport"]["activeNodes"] == {f"node_{node}": 1}
    assert api.ask("GET", "/api/gcs_healthz") == (200, "success")


def test_without_the_token_from_a_page_or_by_another_name_nothing_is_answered(api: Api) -> None:
    for path in ("/api/version", "/api/jobs/", "/api/cluster_status", "/", "/api/what"):
        assert api.ask("GET", path, authorization="")[0] == 401
        assert api.ask("GET", path, authorization="Bearer " + "0" * 64)[0] == 403
        assert api.ask("GET", path, host="evil.example:8265")[0] == 403
        assert api.ask("GET", path, origin=f"http://127.0.0.1:{api.port}")[0] == 403
    assert api.tail("x", Authorization="Bearer no")[0] == 403
    assert api.tail("x", Origin="http://evil.example")[0] == 403
    code, _ = api.ask("POST", "/api/jobs/", {"entrypoint": "true", "submission_id": "forged"}, authorization="Bearer x")
    assert code == 403 and api.ask("GET", "/api/jobs/forged")[0] == 404


def test_a_body_is_not_waited_for_before_the_token_is_known(api: Api) -> None:
    with socket.create_connection(("127.0.0.1", api.port), PATIENCE) as sock:
        sock.sendall(b"POST /api/jobs/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 401 ")


def test_another_user_is_refused_unread_even_with_the_token(api: Api) -> None:
    needs_stranger()
    code = (
        "sock = socket.create_connection(('127.0.0.1', int(sys.argv[1])), 30)\n"
        "request = 'GET /api/version HTTP/1.1\\r\\nHost: localhost\\r\\n'\n"
        "request += f'Authorization: Bearer {sys.argv[2]}\\r\\n\\r\\n'\n"
        "try:\n    sock.sendall(request.encode()); print(sock.recv(100))\nexcept ConnectionError:\n    print(b'')\n"
    )
    assert stranger_says(code, api.port, api.token, load=["encodings.idna"]) == "b''\n"
    path = api.environ["RAY_AUTH_TOKEN_PATH"]
    assert "Permission" in stranger_says(
        "try:\n    print(open(sys.argv[1]).read())\nexcept OSError as error:\n    print(error)\n", path
    )


def test_a_client_that_leaves_while_it_follows_is_forgotten(api: Api) -> None:
    api.ask("POST", "/api/jobs/", {"entrypoint": "exec sleep 600", "submission_id": "followed"})
    handshake = (
        f"GET /api/jobs/followed/logs/tail HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {api.token}\r\n"
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
    )
    for _ in range(40):  # more than there are threads for the calls of all
        with socket.create_connection(("127.0.0.1", api.port), PATIENCE) as sock:
            sock.sendall(handshake.encode())
            assert sock.recv(4096).startswith(b"HTTP/1.1 101 ")
    before = time.monotonic()
    assert api.ask("POST", "/api/jobs/followed/stop")[1] == {"stopped": True}
    assert time.monotonic() - before < PATIENCE


def test_it_is_there_only_when_asked_for_and_leaves_nothing() -> None:
    with Api(HPCRAY_RAY_API="1") as made:
        assert made.ask("GET", "/api/version")[0] == 200
        assert made.ask("PUT", "/api/packages/gcs/a.zip", b"x")[0] == 200
        path = Path(made.environ["RAY_AUTH_TOKEN_PATH"])
        packages = path.with_name(path.name.replace("token", "packages"))
        assert (path.stat().st_mode & 0o777, (packages / "a.zip").exists()) == (0o600, True)
    assert not path.exists() and not packages.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", made.port), PATIENCE)
    address = ray.init(ignore_reinit_error=True)["address"]
    plain = [sys.executable, "-m", "hpcray.cli", "dashboard", "--job", address, "--port", "0"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(plain, env=environ, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = [child.stdout.readline() for _ in range(3)]
        child.send_signal(signal.SIGINT)
        assert child.wait(PATIENCE) == 0
    assert not [text for text in said if "API" in text]


def test_the_users_own_token_is_used_and_not_shown(tmp_path: Path) -> None:
    secret = "a-token-of-the-user-0123456789"
    with Api("--ray-api", RAY_AUTH_TOKEN=secret) as made:
        made.token = secret
        assert made.ask("GET", "/api/version")[0] == 200
        assert "RAY_AUTH_TOKEN_PATH" not in made.environ and secret not in "".join(made.said)
    open_to_all = tmp_path / "token"
    open_to_all.write_text(secret)
    open_to_all.chmod(0o644)
    with pytest.raises(AssertionError, match=r"Ray's API: .*hint: "):
        Api("--ray-api", RAY_AUTH_TOKEN_PATH=str(open_to_all))


def test_on_an_address_of_the_node_without_tls_there_is_a_warning() -> None:
    host = ray.nodes()[0]["NodeManagerAddress"]
    if host.startswith("127."):
        pytest.skip("this host has no address but those of loopback")
    with Api("--ray-api", "--ray-api-host", host) as made:
        connection = http.client.HTTPConnection(host, made.port, timeout=PATIENCE)
        with contextlib.closing(connection):
            connection.request("GET", "/api/version", headers={"Authorization": f"Bearer {made.token}"})
            assert connection.getresponse().status == 200
        assert "warning: other hosts reach" in made.end()


def test_by_tls_it_speaks_https_alone_and_no_old_version(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    cert, key, host = tmp_path / "cert.pem", tmp_path / "key.pem", node_ip_address()
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2",
         "-subj", "/CN=node", "-addext", f"subjectAltName=IP:{host}"],
        check=True, capture_output=True,
    )  # fmt: skip
    with Api("--ray-api", "--ray-api-host", host, "--ray-api-tls", str(cert), str(key)) as api:
        url = api.environ["RAY_API_SERVER_ADDRESS"]
        assert url == f"https://{host}:{api.port}"
        trusted = ssl.create_default_context(cafile=str(cert))
        request = urllib.request.Request(f"{url}/api/version", headers={"Authorization": f"Bearer {api.token}"})
        with urllib.request.urlopen(request, context=trusted, timeout=PATIENCE) as answer:
            assert json.loads(answer.read())["ray_version"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/api/version", context=trusted, timeout=PATIENCE)
        with socket.create_connection((host, api.port), PATIENCE) as plain:
            plain.sendall(f"GET /api/version HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            with contextlib.suppress(ConnectionResetError):
                assert b"HTTP" not in plain.recv(100)
        old = ssl.create_default_context(cafile=str(cert))
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning):
            old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        with socket.create_connection((host, api.port), PATIENCE) as sock, pytest.raises(ssl.SSLError):
            old.wrap_socket(sock, server_hostname=host)
        assert "warning" not in api.end()  # of a token in plain text


@pytest.mark.skipif(not RAY_PYTHON, reason="HPCRAY_TEST_RAY_PYTHON names no Python with the real Ray")
def test_the_client_of_the_real_ray_works(api: Api, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(
        "import os, helped\nprint(helped.WORD, os.environ['OWN'], sorted(os.listdir()))\n"
    )
    module = tmp_path / "modules" / "helped"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text("WORD = 'helped'\n")
    program = tmp_path / "client.py"
    program.write_text(
        "import asyncio, sys\n"
        "from ray.job_submission import JobStatus, JobSubmissionClient\n"
        "client = JobSubmissionClient()\n"
        "where, python = sys.argv[1:]\n"
        "env = {'working_dir': where, 'excludes': ['modules', 'client.py'], 'env_vars': {'OWN': 'word'}}\n"
        "env['py_modules'] = [where + '/modules/helped']\n"
        "job = client.submit_job(entrypoint=python + ' main.py', runtime_env=env, metadata={'k': 'v'})\n"
        "async def follow():\n"
        "    return ''.join([text async for text in client.tail_job_logs(job)])\n"
        "told = asyncio.run(follow())\n"
        "assert told == client.get_job_logs(job), told\n"
        "print(told.splitlines()[-1], client.get_job_status(job) == JobStatus.SUCCEEDED, client.get_version())\n"
        "info = client.get_job_info(job)\n"
        "print(info.metadata, info.type.value, [one.submission_id for one in client.list_jobs()].count(job))\n"
        "long = client.submit_job(entrypoint='sleep 600')\n"
        "print(client.stop_job(long), client.delete_job(job))\n"
        "try:\n    client.get_job_info(job)\nexcept RuntimeError as error:\n    print('404' in str(error))\n"
    )
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "HPCRAY", "RAY"))}
    line = [RAY_PYTHON, str(program), str(tmp_path), sys.executable]
    environ |= {**api.environ, "HOME": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=3 * PATIENCE, check=False)
    assert done.stdout.splitlines() == [
        "helped word ['main.py'] True 4", "{'k': 'v'} SUBMISSION 1", "True True", "True",
    ], done.stderr  # fmt: skip
    refused = subprocess.run(
        [RAY_PYTHON, "-c", "from ray.job_submission import JobSubmissionClient as C; C()"],
        env={**environ, "RAY_AUTH_TOKEN": "0" * 64}, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert "AuthenticationError" in refused.stderr
