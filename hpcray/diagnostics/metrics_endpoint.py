"""A node's metrics: its own figures, and those that its processes have measured, added up, in Prometheus's text format
or in that of OpenMetrics.

    <session directory>/metrics/<name>.json    what one process has measured so far, written every second
    <session directory>/metrics/gone.json      counters and histograms of processes that have ended
    <session directory>/metrics.s              a Unix socket (0600) that serves HTTP: GET /metrics

The process that holds the lock of the directory serves the socket; when that process ends, another one of the node that
measures takes over. A node on which nothing is measured, and nothing exported (`hpcray metrics --serve`), has neither
files nor socket.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler
from itertools import accumulate
from typing import Any

from hpcray.platform.private_files import PrivateDirectory, make_private_directory, open_private_file, read_private_file
from hpcray.platform.process_tree import ProcessIdentity
from hpcray.platform.sockets import connect_private, is_same_user

METRICS_DIRECTORY = "metrics"
METRICS_SOCKET = "metrics.s"
METRIC_PREFIX = "ray_"
_GONE = "gone.json"
_LOCK = "lock"
_HTTP_TIMEOUT = 10.0  # seconds

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
MetricRow = dict[str, Any]
"""One metric of one process: name, kind, help, boundaries, and samples: [[tags as pairs, value], ...]. The value of a
histogram is [count per bucket, ..., count above the last boundary, sum]."""


def write_metrics(session_dir: str, name: str, pid: int, rows: list[MetricRow]) -> None:
    """Write all that one process has measured, in place of what it wrote before.

    Args:
        session_dir: of the node.
        name: of the file: the process's id in hex.
        pid: of the process.
        rows: its metrics.

    Raises:
        OSError: the session has ended, or the disk is full.
    """
    directory = os.path.join(session_dir, METRICS_DIRECTORY)
    if not os.path.isdir(session_dir):  # it is not made again: the session has ended
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), session_dir)
    with PrivateDirectory.open(directory) as metrics:
        metrics.write(name + ".json", json.dumps({"pid": pid, "rows": rows}).encode())


def collect_metrics(session_dir: str) -> list[tuple[str, MetricRow]]:
    """Read what a node's processes have measured, as (process, row). The caller holds the lock of `MetricsEndpoint`.

    Counters and histograms of ended processes are merged into one file; their gauges are dropped.
    """
    directory = os.path.join(session_dir, METRICS_DIRECTORY)
    found: list[tuple[str, MetricRow]] = []
    ended: list[str] = []
    for name in sorted(os.listdir(directory)):
        if not name.endswith(".json"):
            continue
        content = json.loads(read_private_file(os.path.join(directory, name)))
        alive = name == _GONE or ProcessIdentity.of(content["pid"]) is not None
        rows = content["rows"] if alive else [row for row in content["rows"] if row["kind"] != GAUGE]
        found += [(name.removesuffix(".json"), row) for row in rows]
        if not alive:
            ended.append(name)
    if ended:
        kept = {name.removesuffix(".json") for name in [*ended, _GONE]}
        write_metrics(
            session_dir,
            _GONE.removesuffix(".json"),
            0,
            aggregate_metrics((name, row) for name, row in found if name in kept),
        )
        for name in ended:
            os.unlink(os.path.join(directory, name))
    return found


def aggregate_metrics(found: Iterable[tuple[str, MetricRow]]) -> list[MetricRow]:
    """One row per metric: counters and histograms summed, gauges with the process that set them as a tag."""
    total: dict[tuple[str, str], MetricRow] = {}
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


OPENMETRICS = "application/openmetrics-text"
"""The type that a client of OpenMetrics accepts; others get Prometheus's text format."""


def metrics_text(rows: Iterable[MetricRow], common: dict[str, str], accept: str = "") -> tuple[str, str]:
    """Rows in Prometheus's text format, or in that of OpenMetrics.

    Args:
        rows: from `aggregate_metrics`.
        common: labels of every sample.
        accept: what the client accepts, as in HTTP.

    Returns:
        The text and its content type.
    """
    from prometheus_client.exposition import choose_encoder  # 20 ms, which only a process that serves metrics spends

    encode, content_type = choose_encoder(accept)
    text = encode(_Families(rows, common)).decode()
    if content_type.startswith(OPENMETRICS):
        return text, content_type
    lines = text.splitlines()
    return "".join((line if line.startswith("#") else line.removesuffix(".0")) + "\n" for line in lines), content_type


class _Families:
    """A collector, as prometheus_client calls it: the rows of a node as metric families."""

    def __init__(self, rows: Iterable[MetricRow], common: dict[str, str]) -> None:
        self._rows = rows
        self._common = common

    def collect(self) -> Iterator[Any]:
        from prometheus_client.metrics_core import Metric

        for row in self._rows:
            name, kind = METRIC_PREFIX + row["name"], row["kind"]
            family = Metric(name, row["help"], kind)
            for pairs, value in row["samples"]:
                labels = {**self._common, **dict(pairs)}
                if kind != HISTOGRAM:
                    family.add_sample(name + "_total" * (kind == COUNTER), labels, value)
                    continue
                *counts, total = value
                boundaries = [*(repr(float(boundary)).removesuffix(".0") for boundary in row["boundaries"]), "+Inf"]
                for boundary, below in zip(boundaries, accumulate(counts), strict=True):
                    family.add_sample(name + "_bucket", {**labels, "le": boundary}, below)
                family.add_sample(name + "_sum", labels, total)
                family.add_sample(name + "_count", labels, sum(counts))
            yield family


class MetricsEndpoint:
    """Serves the metrics of a node, unless another process of the node does.

    Args:
        session_dir: of the node.
        common: labels of every sample.
        before: called before each answer, to write what this process has measured up to now.
        own: gives the rows of the node's own figures.
    """

    def __init__(
        self,
        session_dir: str,
        common: dict[str, str],
        before: Callable[[], None],
        own: Callable[[], list[MetricRow]] = list,
    ) -> None:
        self._session_dir = session_dir
        self._common = common
        self._before = before
        self._own = own
        self._lock_fd = -1
        self._collecting = threading.Lock()
        self._server: socketserver.BaseServer | None = None

    def try_to_serve(self, make: bool = False) -> bool:
        """Start to serve, unless another process does. Returns whether this one serves. Call it periodically.

        Args:
            make: serve also where nothing is measured.
        """
        if self._server is not None:
            return True
        directory = os.path.join(self._session_dir, METRICS_DIRECTORY)
        if make:
            make_private_directory(directory)
        try:
            fd = open_private_file(os.path.join(directory, _LOCK), os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return False
        self._lock_fd = fd
        path = os.path.join(self._session_dir, METRICS_SOCKET)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # left by a process that died
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _HTTP_TIMEOUT

            def do_GET(self) -> None:
                text, content_type = endpoint.text(self.headers.get("Accept", ""))
                body = text.encode()
                self.send_response(200)
                self.send_header("Content-Type", content_type)
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

    def text(self, accept: str = "") -> tuple[str, str]:
        """The metrics of the node and of all its processes, and the content type; see `metrics_text`."""
        with self._collecting:
            self._before()
            rows = aggregate_metrics(collect_metrics(self._session_dir))
            return metrics_text([*self._own(), *rows], self._common, accept)

    def close(self) -> None:
        """Serve no longer; another process may."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._session_dir, METRICS_SOCKET))
            os.close(self._lock_fd)
            self._server, self._lock_fd = None, -1


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Serve only processes of this user, whatever the directory's mode has become."""
        return is_same_user(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: the client has gone."""


def read_metrics(session_dir: str, accept: str = "") -> str:
    """The metrics of a node, read from its endpoint; "" where nothing is measured, nor exported.

    Raises:
        OSError: the endpoint exists and does not answer.
    """
    path = os.path.join(session_dir, METRICS_SOCKET)
    if not os.path.exists(path):
        return ""
    response = b""
    with connect_private(path, timeout=_HTTP_TIMEOUT) as sock:
        sock.sendall(f"GET /metrics HTTP/1.0\r\nAccept: {accept or '*/*'}\r\n\r\n".encode())
        while more := sock.recv(1 << 16):
            response += more
    return response.partition(b"\r\n\r\n")[2].decode()


_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: .*)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


def parse_samples(text: str) -> list[dict[str, Any]]:
    """Return the samples of a text in Prometheus's format, for programs that do not read it: name, type, labels, value.

    A value that is no number, or has no bound, is None, as JSON has neither.
    """
    found: list[dict[str, Any]] = []
    name = kind = ""
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, _, kind = line.removeprefix("# TYPE ").partition(" ")
        elif not line.startswith("#") and (parts := _SAMPLE.fullmatch(line)):
            labels = {
                label: re.sub(r"\\[n\"\\]", lambda one: _ESCAPES[one[0]], value)
                for label, value in _LABEL.findall(parts[2] or "")
            }
            value = float(parts[3])
            own = kind if parts[1].startswith(name) else "untyped"
            found.append(
                {"name": parts[1], "type": own, "labels": labels, "value": value if math.isfinite(value) else None}
            )
    return found
