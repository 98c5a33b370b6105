"""`hpcray progress`: how far the tasks of a job are, in the bottom line of the terminal, or in a line now and then."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType

import click

from hpcray.cli import json_option, print_record
from hpcray.cli.job_option import job, job_option
from hpcray.common.exceptions import RayError
from hpcray.common.terminal_text import plain
from hpcray.platform.console import terminal_size
from hpcray.platform.session_directory import read_session
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.state.overview import FunctionUse, JobOverview, JobUse
from hpcray.state.reports import format_duration

_TERMINAL, _LINES = 1.0, 30.0
"""Seconds between two samples."""
_PATIENCE = 1.0
"""Seconds that the nodes may take for one."""
_LAST_SAMPLES = 10
"""Samples at the end of the job until no task runs any more."""
_LAST_OF_PROGRAM = 5
"""The same where the program has ended and the job not yet: a worker on a busy machine may have missed a question."""
_FIRST_PAUSE = 0.05
"""Seconds before the second of these samples; each pause is twice as long as the one before."""
_LONGEST_PAUSE = 0.4  # seconds
_MOST_FUNCTIONS = 8
_FEWEST_ROWS = 3
_SAVE, _RESTORE = "\x1b7", "\x1b8"


@click.command()
@job_option
@click.option(
    "--interval",
    type=click.FloatRange(0.2),
    help=f"Seconds between two samples (default: {_TERMINAL:g} on a terminal, {_LINES:g} elsewhere).",
)
@json_option("a stream of samples where something has changed: counts, of each function too")
def progress(address: str, interval: float | None, as_json: bool) -> None:
    """Show how far the tasks of a running job are, by function, until it ends or Ctrl-C; on standard error.

    On a terminal it is the bottom line, above which everything else scrolls. Elsewhere a line is printed where
    something has changed. hpcray-launch --progress does this for its job.
    """
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    line = StatusLine(2, os.environ) if not as_json and terminal_size(2, os.environ) is not None else None
    with job(address) as process, contextlib.suppress(OSError):
        _show_until(ended, process, line, interval or (_LINES if line is None else _TERMINAL), as_json)


def _show_until(
    ended: threading.Event, process: CoreWorker, line: StatusLine | None, interval: float, as_json: bool
) -> None:
    overview = JobOverview(process, _PATIENCE)
    began = read_session(process.place.session_dir).started
    job_ends = threading.Event()

    def end(code: int) -> None:
        job_ends.set()
        ended.set()

    process.exit_listeners.append(end)
    shown = text = ""
    use: JobUse | None = None
    running = True
    samples_left, pause = _LAST_SAMPLES, _FIRST_PAUSE
    try:
        while process.dead is None:
            last = ended.wait(interval)
            if last and not job_ends.is_set():
                samples_left = min(samples_left, _LAST_OF_PROGRAM)
            with contextlib.suppress(ConnectionError, RayError):  # the job ends
                use = overview.sample()
                text = progress_text(use, time.time() - began, line.columns - 1 if line is not None else None)
                counts = text.partition(": ")[2]
                if line is not None:
                    line.show(text)
                elif counts != shown and not last:
                    _print(use, text, began, as_json)
                shown = counts
                running = any(one.running for one in use.functions)
            if last and not (samples_left and running):
                break
            if last:  # workers that are ending report their last tasks to their raylet as they go
                samples_left -= 1
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
    finally:
        if line is not None:
            line.close()
    if use is not None:
        _print(use, text, began, as_json)


def _print(use: JobUse, text: str, began: float, as_json: bool) -> None:
    if not as_json:
        print(f"hpcray: {text}", file=sys.stderr, flush=True)
        return
    functions = [{"name": one.name, **_counts([one])} for one in use.functions]
    lost = sum(bool(one.problem) and not one.left for one in use.nodes)
    print_record(
        time=use.time, seconds=use.time - began, left=use.left, nodes=len(use.nodes), lost=lost,
        **_counts(use.functions), functions=functions,
    )  # fmt: skip


def _counts(functions: Sequence[FunctionUse]) -> dict[str, int]:
    whole = {name: sum(getattr(one, name) for one in functions) for name in _COUNTS}
    return {"done": whole["ended"] - whole["failed"], **{name: whole[name] for name in ("running", "queued", "failed")}}


def progress_text(use: JobUse, seconds: float, width: int | None) -> str:
    """`1:23, 58:37 left: 1000 done, 12 running, 40 queued, 2 failed | train.step 998/1052, 2 failed | load 2/4`.

    Args:
        seconds: since the start. width: the most characters, None for as many as it takes.
    """
    whole = FunctionUse("", *(sum(getattr(one, name) for one in use.functions) for name in _COUNTS))
    left = f", {format_duration(use.left)} left" if use.left is not None else ""
    lost = sum(bool(one.problem) and not one.left for one in use.nodes)
    parts = [f"{whole.ended - whole.failed} done", f"{whole.running} running"]
    parts += [f"{whole.queued} queued"] if whole.queued else []
    parts += [f"{whole.failed} failed"] if whole.failed else []
    parts += [f"{lost} of {len(use.nodes)} nodes lost"] if lost else []
    text = f"{format_duration(seconds)}{left}: {', '.join(parts)}"
    order = sorted(use.functions, key=lambda one: (-one.running, -one.queued, -one.total))
    for one in order[:_MOST_FUNCTIONS]:
        part = f"{plain(one.name)} {one.ended - one.failed}/{one.ended + one.running + one.queued}"
        part += f", {one.failed} failed" if one.failed else ""
        if width is not None and len(text) + len(part) + 3 > width:
            break
        text += f" | {part}"
    return text


_COUNTS = ("running", "queued", "ended", "failed")


class StatusLine:
    """The last row of a terminal. What others print scrolls in the rows above it (the terminal's scroll region).

    Args:
        fd: where to write.
        environ: see `terminal_size`.
    """

    def __init__(self, fd: int, environ: Mapping[str, str]) -> None:
        self._fd, self._environ = fd, environ
        self._size: tuple[int, int] | None = None

    @property
    def columns(self) -> int:
        """The width of the terminal."""
        size = terminal_size(self._fd, self._environ)
        return size[0] if size is not None else 0

    def show(self, text: str) -> None:
        """Show a line, cut to the width of the terminal.

        Raises:
            OSError: the terminal is gone.
        """
        size = terminal_size(self._fd, self._environ)
        if size is None or size[1] < _FEWEST_ROWS:
            return
        columns, rows = size
        out = ""
        if size != self._size:
            self._size = size
            # "Index" makes room where the cursor is in the last row; setting the region moves the cursor.
            out = f"\x1bD{_SAVE}\x1b[1;{rows - 1}r{_RESTORE}\x1b[1A"
        out += f"{_SAVE}\x1b[{rows};1H\x1b[2K\x1b[7m{plain(text)[: columns - 1]}\x1b[0m{_RESTORE}"
        os.write(self._fd, out.encode())

    def close(self) -> None:
        """Give the row back.

        Raises:
            OSError: the terminal is gone.
        """
        if self._size is not None:
            rows, self._size = self._size[1], None
            os.write(self._fd, f"{_SAVE}\x1b[r\x1b[{rows};1H\x1b[2K{_RESTORE}".encode())
