"""A node's metrics: what each of its processes has measured, added up, as the text that Prometheus reads.

    <session directory>/metrics/<name>.json    what one process has measured so far, written every second
    <session directory>/metrics/gone.json      counters and histograms of processes that have ended
    <session directory>/metrics.s              a Unix socket (0600) that answers HTTP: GET /metrics

The process that holds the lock of the directory answers; when it ends, another one of the node that measures takes
over. A node on which nobody measures anything has none of this.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socketserver
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler
from typing import Any

from hpcray.host.peers import connect_private, is_ours

DIRECTORY = "metrics"
SOCKET = "metrics.s"
PREFIX = "ray_"
_GONE = "gone.json"
_LOCK = "lock"
_CONTENT = "text/plain; version=0.0.4; charset=utf-8"
_ANSWER_LIMIT = 10.0

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
Row = dict[str, Any]
"""One metric of one process: name, kind, help, boundaries, and samples: [[tags as pairs, value], ...]. The value of a
histogram is [count per bucket, ..., count beyond, sum]."""


def write(session_dir: str, name: str, pid: int, rows: list[Row]) -> None:
    """Leave what a process has measured where it is read."""
    directory = os.path.join(session_dir, DIRECTORY)
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    path = os.path.join(directory, name + ".json")
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump({"pid": pid, "rows": rows}, file)
    os.replace(path + ".new", path)


def collect(session_dir: str) -> list[tuple[str, Row]]:
    """(process, row) of all that the processes of a node have measured. Call it with the lock of `Endpoint` held.

    What processes that have ended counted is kept in one file for all of them; their gauges are gone.
    """
    directory = os.path.join(session_dir, DIRECTORY)
    found: list[tuple[str, Row]] = []
    ended: list[str] = []
    for name in sorted(os.listdir(directory)):
        if not name.endswith(".json"):
            continue
        with open(os.path.join(directory, name), encoding="utf-8") as file:
            said = json.load(file)
        alive = name == _GONE or os.path.exists(f"/proc/{said['pid']}")
        rows = said["rows"] if alive else [row for row in said["rows"] if row["kind"] != GAUGE]
        found += [(name.removesuffix(".json"), row) for row in rows]
        if not alive:
            ended.append(name)
    if ended:
        kept = {name.removesuffix(".json") for name in [*ended, _GONE]}
        write(session_dir, _GONE.removesuffix(".json"), 0, add_up((name, row) for name, row in found if name in kept))
        for name in ended:
            os.unlink(os.path.join(directory, name))
    return found


def add_up(found: Iterable[tuple[str, Row]]) -> list[Row]:
    """One row per metric: counters and histograms added up, gauges with the process that set them as a tag."""
    total: dict[tuple[str, str], Row] = {}
    samples: dict[tuple[str, str], dict[tuple[tuple[str, str], ...], Any]] = {}
    for process, row in found:
        key = row["name"], row["kind"]
        total.setdefault(key, {**row, "samples": []})
        held = samples.setdefault(key, {})
        for pairs, value in row["samples"]:
            tags = tuple((name, text) for name, text in pairs)
            if row["kind"] == GAUGE:
                held[tags + (("WorkerId", process),)] = value  # noqa: RUF005
            elif row["kind"] == COUNTER:
                held[tags] = held.get(tags, 0) + value
            else:
                before = held.get(tags, [])
                same = len(before) == len(value)
                held[tags] = [a + b for a, b in zip(before, value, strict=True)] if same else value
    for key, row in total.items():
        row["samples"] = [[list(map(list, tags)), value] for tags, value in sorted(samples[key].items())]
    return [total[key] for key in sorted(total)]


def text_of(rows: Iterable[Row], common: dict[str, str]) -> str:
    """Rows in Prometheus's text format.

    Args:
        rows: as `add_up` makes them.
        common: labels that all samples get.
    """
    lines: list[str] = []
    for row in rows:
        name = PREFIX + row["name"] + ("_total" if row["kind"] == COUNTER else "")
        shown_help = row["help"].replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {name} {shown_help}", f"# TYPE {name} {row['kind']}"]
        for pairs, value in row["samples"]:
            labels = {**common, **dict(pairs)}
            if row["kind"] == HISTOGRAM:
                lines += _histogram(name, labels, row["boundaries"], value)
            else:
                lines.append(f"{name}{_labels(labels)} {_number(value)}")
    return "".join(line + "\n" for line in lines)


def _histogram(name: str, labels: dict[str, str], boundaries: list[float], value: list[float]) -> list[str]:
    *counts, total = value
    lines, below = [], 0.0
    for boundary, count in zip([*map(_number, boundaries), "+Inf"], counts, strict=True):
        below += count
        lines.append(f"{name}_bucket{_labels({**labels, 'le': boundary})} {_number(below)}")
    return [*lines, f"{name}_sum{_labels(labels)} {_number(total)}", f"{name}_count{_labels(labels)} {_number(below)}"]


def _number(value: float) -> str:
    return repr(float(value)).removesuffix(".0")


def _labels(labels: dict[str, str]) -> str:
    escape = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    shown = ",".join(f'{name}="{text.translate(escape)}"' for name, text in labels.items())
    return f"{{{shown}}}" if shown else ""


class Endpoint:
    """Answers for a node, if nobody else does.

    Args:
        session_dir: of the node.
        common: labels that all samples get.
        before: called before each answer, to write what this process has measured up to now.
    """

    def __init__(self, session_dir: str, common: dict[str, str], before: Callable[[], None]) -> None:
        self._session_dir = session_dir
        self._common = common
        self._before = before
        self._lock_fd = -1
        self._collecting = threading.Lock()
        self._server: socketserver.BaseServer | None = None

    def try_to_serve(self) -> bool:
        """Become the one who answers, unless somebody is; whether we are. Called now and again."""
        if self._server is not None:
            return True
        directory = os.path.join(self._session_dir, DIRECTORY)
        try:
            fd = os.open(os.path.join(directory, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return False
        self._lock_fd = fd
        path = os.path.join(self._session_dir, SOCKET)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of one who died
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _ANSWER_LIMIT

            def do_GET(self) -> None:
                body = endpoint.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", _CONTENT)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

            def address_string(self) -> str:
                return "unix"

        self._server = _Server(path, Handler)
        os.chmod(path, 0o600)
        threading.Thread(target=self._server.serve_forever, name="hpcray-metrics-endpoint", daemon=True).start()
        return True

    def text(self) -> str:
        """All that the node's processes have measured."""
        with self._collecting:
            self._before()
            return text_of(add_up(collect(self._session_dir)), self._common)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Only processes of this user are answered, whatever the directory's mode has become."""
        return is_ours(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asked has gone: nobody is left to be told."""


def ask(session_dir: str) -> str:
    """The metrics of a node, as its endpoint tells them; "" where nothing is measured.

    Raises:
        OSError: there is an endpoint, and it does not answer.
    """
    path = os.path.join(session_dir, SOCKET)
    if not os.path.exists(path):
        return ""
    said = b""
    with connect_private(path, timeout=_ANSWER_LIMIT) as sock:
        sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        while more := sock.recv(1 << 16):
            said += more
    return said.partition(b"\r\n\r\n")[2].decode()
