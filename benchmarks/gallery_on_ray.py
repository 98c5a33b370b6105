"""What the notebook of the gallery does with `hpcray.cluster.submit`, with a cluster and a job of Ray's own.

`benchmarks/gallery.py` lets the notebook import `submit` from here. A job starts a cluster with `ray start`, runs the
function as a job of it (`JobSubmissionClient`), and ends the cluster, not by `ray stop`, which would end every Ray
of this machine.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

POLL = 0.1  # seconds
START_TIMEOUT = 60.0  # seconds


class Job:
    """A function that runs in a cluster of its own.

    Attributes:
        state: the job's status, as Ray gives it.
    """

    def __init__(self, directory: str, cpus: int) -> None:
        # Ray 2.60 wants a token of whoever submits to a cluster that `ray start` has started.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        from ray.job_submission import JobSubmissionClient

        self.state = "PENDING"
        self._output = ""
        self._directory = Path(directory)
        dashboard, gcs = _free_port(), _free_port()
        ray = str(Path(sys.executable).with_name("ray"))
        options = [f"--num-cpus={cpus}", f"--port={gcs}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
        self._cluster = subprocess.Popen(
            [ray, "start", "--head", "--block", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._client = self._connect(f"http://127.0.0.1:{dashboard}", JobSubmissionClient)
        self._id = self._client.submit_job(entrypoint=f"{sys.executable} {__file__} {directory}")

    def _connect(self, address: str, client: Callable[[str], Any]) -> Any:
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            try:
                return client(address)
            except ConnectionError:
                if time.monotonic() > deadline or self._cluster.poll() is not None:
                    self._end()
                    raise
            time.sleep(POLL)

    def _end(self) -> None:
        self._cluster.terminate()
        self._cluster.wait()

    def result(self) -> Any:
        """Wait for the function's result.

        Raises:
            RuntimeError: the job has failed; with its output.
        """
        try:
            while not self._client.get_job_status(self._id).is_terminal():
                time.sleep(POLL)
            self.state = str(self._client.get_job_status(self._id).value)
            self._output = self._client.get_job_logs(self._id)
        finally:
            self._end()
        if self.state != "SUCCEEDED":
            raise RuntimeError(self._output)
        return pickle.loads((self._directory / "result").read_bytes())

    def stdout(self) -> str:
        """Return what the function has printed."""
        return self._output


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
    return port


def submit(function: Callable[..., Any], *args: Any, nodes: int, cpus_per_node: int, time: str) -> Job:
    """Run `function(*args)`. Ray has one node here, with the CPUs of all; `time` has no counterpart."""
    directory = tempfile.mkdtemp(prefix="job-", dir=".")
    Path(directory, "call").write_bytes(cloudpickle.dumps((function, args)))
    return Job(str(Path(directory).resolve()), nodes * cpus_per_node)


def main() -> None:
    """Run the function of a job, in the job."""
    directory = Path(sys.argv[1])
    function, args = pickle.loads((directory / "call").read_bytes())
    (directory / "result").write_bytes(pickle.dumps(function(*args)))


if __name__ == "__main__":
    main()
