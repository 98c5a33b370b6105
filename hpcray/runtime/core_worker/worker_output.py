"""Output of workers, in the driver: shown on its `sys.stdout` and `sys.stderr`, each line with its origin.

A thread of its own prints: what a program has put in place of these streams may be slow, or wait for the program.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, TextIO

from hpcray.common.ids import raylet_of
from hpcray.common.job_names import LOG_PREFIX_INFO_MESSAGE
from hpcray.common.terminal_text import plain as plain_text
from hpcray.core.core_worker.output_lines import LogBatch, LogDeduplicator, OutputLines
from hpcray.platform.sockets import node_ip_address
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.context import Handler
from hpcray.runtime.core_worker.io_engine import IoEngine

DEDUP_VARIABLE = "RAY_DEDUP_LOGS"
_WINDOW = "RAY_DEDUP_LOGS_AGG_WINDOW_S"
_ALWAYS = "RAY_DEDUP_LOGS_ALLOW_REGEX"
_NEVER = "RAY_DEDUP_LOGS_SKIP_REGEX"
TESTING_NEVER_DEDUP_TOKEN = "__ray_testing_never_deduplicate__"
RAY_TQDM_MAGIC = "__ray_tqdm_magic_token__"
"""In a line of a worker that is the state of a progress bar."""
line_filters: dict[str, Callable[[str], str]] = {}
"""By a token: takes a line of a worker that has the token in it, and returns what is left to be printed.

Packages above this one add theirs when they are imported."""
_FLUSH_TIMEOUT = 1.0
"""Seconds that a driver which ends waits for more output without any coming."""
_RESET = "\x1b[0m"
_CYAN, _YELLOW, _MAGENTA, _GREEN = "\x1b[36m", "\x1b[33m", "\x1b[35m", "\x1b[32m"
_COLORS = (_MAGENTA, _CYAN, _GREEN, "\x1b[90m", "\x1b[94m", "\x1b[95m")


class WorkerBars:
    """The progress bars on this driver's terminal.

    Attributes:
        manager: `hpcray.experimental.tqdm_ray.instance()`, which is above this package; None while there are no bars.
    """

    manager: Any = None

    @staticmethod
    @contextlib.contextmanager
    def hidden() -> Iterator[None]:
        """Keep bars off the screen while something is printed."""
        bars = WorkerBars.manager
        if bars is None:
            yield
            return
        bars.hide_bars()
        try:
            yield
        finally:
            bars.unhide_bars()

    @staticmethod
    def close() -> None:
        """End all bars: the program ends, or prints a traceback."""
        if WorkerBars.manager is not None:
            with contextlib.suppress(Exception):  # of a stream of the program's
                WorkerBars.manager.close()

    @staticmethod
    def take(lines: Iterable[str]) -> Iterator[str]:
        """Show the bars that lines are about. Yields the other lines."""
        for line in lines:
            token = next((token for token in line_filters if token in line), None)
            if token is None:
                yield line
            elif rest := line_filters[token](line):
                yield rest


class WorkerOutputPrinter:
    """Prints what this driver's workers print.

    Args:
        engine: of this process, for the answers.
        show: takes each batch of lines.
    """

    def __init__(self, engine: IoEngine, show: Callable[[LogBatch], None] | None = None) -> None:
        self._engine = engine
        self._show = show or print_to_stdstream
        self._lines = OutputLines()
        counting = os.environ.get(DEDUP_VARIABLE, "0") == "1"
        self._counters = {error: _deduplicator() for error in (False, True)} if counting else {}
        self._queue: SimpleQueue[tuple[bytes, m.WorkerOutput | m.OutputFlushed]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._silent: set[bytes] = set()
        self._flushed = threading.Event()
        self._progress = 0
        self._bare = False

    def drop_prefixes(self) -> None:
        """Show lines as they are from now on: what the job's `LoggingConfig` writes says itself where it comes from."""
        self._bare = True

    def on_message(self, src: bytes, msg: m.WorkerOutput | m.OutputFlushed) -> None:
        """Take output, or the word that there is no more (lock held)."""
        self._queue.put((src, msg))
        if self._thread is None and not self._silent:
            self._thread = threading.Thread(target=self._run, name="hpcray-output", daemon=True)
            self._thread.start()

    def finish(self, nodes: Iterable[int]) -> None:
        """Wait until what workers of these nodes have printed so far is shown."""
        engine = self._engine
        with engine.lock:
            self._silent = {raylet_of(node) for node in nodes}
            for raylet in self._silent:
                engine.send(raylet, m.FlushOutput())
            engine.flush()
            engine.flush_soon()
        if self._thread is None:  # and none starts any more: this may be the end of the interpreter
            with contextlib.suppress(Empty):
                while not self._flushed.is_set():
                    self._handle(*self._queue.get(timeout=_FLUSH_TIMEOUT))
        seen = -1
        while self._thread is not None and not self._flushed.wait(_FLUSH_TIMEOUT) and seen != self._progress:
            seen = self._progress

    def _run(self) -> None:
        while not self._flushed.is_set():
            try:
                src, msg = self._queue.get(timeout=self._patience())
            except Empty:
                self._show_overdue()
            else:
                self._handle(src, msg)

    def _handle(self, src: bytes, msg: m.WorkerOutput | m.OutputFlushed) -> None:
        self._progress += 1
        with contextlib.suppress(Exception):  # a stream of the program's that fails is no reason to stop
            self._take(src, msg)
        if isinstance(msg, m.WorkerOutput):
            with self._engine.lock:
                if not self._engine.closed:
                    self._engine.send(src, m.OutputPrinted(len(msg.data)))
                    self._engine.flush()

    def _take(self, src: bytes, msg: m.WorkerOutput | m.OutputFlushed) -> None:
        now = time.monotonic()
        if isinstance(msg, m.WorkerOutput):
            self._count_and_show(now, self._lines.feed(now, msg))
            if msg.last and not msg.error and WorkerBars.manager is not None:
                WorkerBars.manager.forget(msg.ip, msg.pid)
            return
        self._silent.discard(src)
        if not self._silent:
            try:
                self._count_and_show(now, self._lines.overdue(float("inf")))
                for counter in self._counters.values():
                    self._show_all(counter.flush())
            finally:
                self._flushed.set()

    def _count_and_show(self, now: float, batches: list[LogBatch]) -> None:
        for batch in batches:
            counter = self._counters.get(batch["is_err"])
            self._show_all([batch] if counter is None else counter.deduplicate(now, batch))

    def _show_overdue(self) -> None:
        now = time.monotonic()
        with contextlib.suppress(Exception):
            self._count_and_show(now, self._lines.overdue(now))
            for counter in self._counters.values():
                self._show_all(counter.expired(now))

    def _show_all(self, batches: list[LogBatch]) -> None:
        for batch in batches:
            self._show({**batch, "localhost": node_ip_address(), "bare": self._bare})

    def _patience(self) -> float | None:
        times = [self._lines.next_overdue(), *(counter.next_expiry() for counter in self._counters.values())]
        known = [when for when in times if when is not None]
        return max(0.0, min(known) - time.monotonic()) + 0.001 if known else None


def print_to_stdstream(batch: LogBatch, ignore_prefix: bool = False) -> None:
    """Print lines of a worker on the standard output or error of this process.

    Args:
        ignore_prefix: print the lines as they are.
    """
    stream = sys.stderr if batch["is_err"] else sys.stdout
    if stream is not None:
        colored = os.environ.get("RAY_COLOR_PREFIX") == "1" or (stream.isatty() and not os.environ.get("NO_COLOR"))
        print_worker_logs(batch, stream, ignore_prefix, colored)


def print_worker_logs(
    batch: LogBatch, print_file: TextIO, ignore_prefix: bool = False, colored: bool | None = None
) -> None:
    """Print lines of a worker, each with the name of its task or actor, its pid, and its address if that is another.

    Args:
        colored: whether the prefix is; by default unless RAY_COLOR_PREFIX is 0. 1: in a color for each pid.
    """
    setting = os.environ.get("RAY_COLOR_PREFIX")
    colored = (setting != "0") if colored is None else colored and setting != "0"
    asked = os.environ.get("RAY_DISABLE_WORKER_LOG_PREFIX") in ("1", "true", "True")
    bare = asked or ignore_prefix or batch.get("bare")
    pid = batch.get("pid")
    name = batch.get("actor_name") or batch.get("task_name")
    title = "" if pid in ("autoscaler", "raylet") else f"{plain_text(name)} pid=" if name else "pid="
    ip = batch.get("ip")
    where = "" if ip == batch.get("localhost") else f", ip={ip}"
    lines = list(WorkerBars.take(batch.get("lines", ())))
    if not lines:
        return
    with WorkerBars.hidden():
        for line in lines:
            text = line.split(LOG_PREFIX_INFO_MESSAGE)[1] if LOG_PREFIX_INFO_MESSAGE in line else line
            color, plain = (_color_of(pid, line, setting == "1"), _RESET) if colored else ("", "")
            prefix = "" if bare else f"{color}({title}{pid}{where}){plain} "
            print(f"{prefix}{text}\n", end="", file=print_file)  # one write, also where Python does not buffer
        if hasattr(print_file, "flush"):
            print_file.flush()


def _color_of(pid: object, line: str, by_pid: bool) -> str:
    if pid == "raylet" and LOG_PREFIX_INFO_MESSAGE not in line:
        return _YELLOW
    if pid == "autoscaler":
        return _YELLOW if "Error:" in line or "Warning:" in line else _CYAN
    if not by_pid:
        return _CYAN
    text = str(pid)
    return _COLORS[(int(text) if text.isdigit() else 0) % len(_COLORS)]


def _deduplicator() -> LogDeduplicator:
    try:
        window = float(os.environ.get(_WINDOW, "5"))
    except ValueError:
        window = 5.0
    allowed = re.compile(os.environ.get(_ALWAYS) or TESTING_NEVER_DEDUP_TOKEN).search

    def always(line: str) -> bool:
        return RAY_TQDM_MAGIC in line or allowed(line) is not None

    never = os.environ.get(_NEVER)
    return LogDeduplicator(window, always, re.compile(never).search if never else lambda line: False)


HANDLERS: dict[type, Callable[[WorkerOutputPrinter], Handler]] = {
    m.WorkerOutput: lambda printer: printer.on_message,
    m.OutputFlushed: lambda printer: printer.on_message,
}
"""The handlers of a driver, beside `core_worker.HANDLERS`."""
