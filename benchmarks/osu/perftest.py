"""UCX's own benchmark, ucx_perftest, which the libucx wheel brings along: UCX without Python."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from effort import Effort
from table import Column

_TIMEOUT = 60.0


class NoPerftestError(Exception):
    """It cannot be run; the message says why."""


def find() -> tuple[str, dict[str, str]]:
    """The program, and the environment it needs.

    Raises:
        NoPerftestError: there is none.
    """
    spec = importlib.util.find_spec("libucx")
    for root in (spec.submodule_search_locations or []) if spec is not None else []:
        program = Path(root, "bin", "ucx_perftest")
        if program.exists():
            paths = [str(Path(root, "lib")), os.environ.get("LD_LIBRARY_PATH", "")]
            return str(program), {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))}
    program_found = shutil.which("ucx_perftest")
    if program_found is None:
        raise NoPerftestError("ucx_perftest is neither in the libucx wheel nor on the path")
    return program_found, dict(os.environ)


def columns(sizes: list[int], effort: Effort, memory: str = "host") -> tuple[Column, Column]:
    """Latency in us (half a round trip, the median) and bandwidth in MB/s, between two processes of this host.

    Args:
        sizes: bytes.
        effort: how often.
        memory: "host" or "cuda".

    Raises:
        NoPerftestError: it is not there, or it failed.
    """
    program, environ = find()
    latency: Column = {}
    bandwidth: Column = {}
    for size in sizes:
        count = max(10, min(2 * effort.messages, effort.budget // size // 8))
        latency[size] = _run(program, environ, "tag_lat", size, count, memory)[1]
        # Its MB are 2**20 bytes.
        bandwidth[size] = _run(program, environ, "tag_bw", size, count, memory)[5] * (1 << 20) / 1e6
    return latency, bandwidth


def _run(program: str, environ: dict[str, str], test: str, size: int, count: int, memory: str) -> list[float]:
    """Its figures: iterations; latency median, average, overall; bandwidth average, overall; and message rates."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    common = ["-p", port]
    server = subprocess.Popen(
        [program, *common], env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        command = [program, "127.0.0.1", *common, "-t", test, "-s", str(size), "-n", str(count), "-w", "10", "-f", "-v"]
        deadline = time.monotonic() + _TIMEOUT
        while True:
            ended = subprocess.run(
                [*command, "-m", memory], env=environ, capture_output=True, text=True, timeout=_TIMEOUT, check=False
            )
            # The server may not be listening yet.
            if ended.returncode == 0 or server.poll() is not None or time.monotonic() > deadline:
                break
            time.sleep(0.1)
    except subprocess.TimeoutExpired as error:
        raise NoPerftestError(f"ucx_perftest {test} of {size} bytes did not end in {_TIMEOUT:.0f} s") from error
    finally:
        server.kill()
        server.wait()
    lines = [line for line in ended.stdout.splitlines() if line.count(",") >= 7 and line.strip()[0].isdigit()]
    if ended.returncode or not lines:
        raise NoPerftestError(f"ucx_perftest {test} failed: {(ended.stderr or ended.stdout).strip()[-300:]}")
    return [float(word) for word in lines[-1].split(",")]
