"""The process that exports the metrics of one node for as long as its job runs."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from functools import partial
from pathlib import Path
from types import FrameType

from hpcray.diagnostics.metrics_endpoint import METRICS_SOCKET, MetricsEndpoint, metrics_text, read_metrics
from hpcray.platform.private_files import write_private_file
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.state.node_metrics import common_labels, own_metrics

_PERIOD = 0.5
"""Seconds between two looks whether the job runs, and whether a process serves."""
_MODE = 0o644
"""The mode of the text file: a collector is another user."""


def export_metrics(process: CoreWorker, directory: Path | None, interval: float) -> None:
    """Serve the metrics of the node of this process on its socket, and write them to a file, until the job ends.

    SIGTERM and Ctrl-C end it too; the file is removed at the end.

    Args:
        directory: of the file, `hpcray-<session>-<node>.prom`; None: there is none.
        interval: seconds between two versions of the file.

    Raises:
        OSError: the directory is not writable.
    """
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    name = f"hpcray-{os.path.basename(process.session_dir)}-{process.node}.prom"
    path = directory / name if directory is not None else None
    endpoint = MetricsEndpoint(process.session_dir, common_labels(process), lambda: None, partial(own_metrics, process))
    since_written = interval
    try:
        while process.dead is None:
            with contextlib.suppress(OSError):  # the session directory is gone: the job has ended
                endpoint.try_to_serve(make=True)
            if path is not None and since_written >= interval:
                _write(path, _text(process))
                since_written = 0.0
            if ended.wait(min(_PERIOD, interval)):
                break
            since_written += min(_PERIOD, interval)
    finally:
        endpoint.close()
        if path is not None:
            path.unlink(missing_ok=True)


def _text(process: CoreWorker) -> str:
    """All metrics of the node: from the process that serves them, else the node's own."""
    with contextlib.suppress(OSError):
        if os.path.exists(os.path.join(process.session_dir, METRICS_SOCKET)):
            return read_metrics(process.session_dir)
    return metrics_text(own_metrics(process), common_labels(process))[0]


def _write(path: Path, text: str) -> None:
    """A collector sees the old file or the new one, whole."""
    write_private_file(str(path), text.encode(), mode=_MODE)
