"""Profiles of this process, made in a thread of its own while one is asked for (`hpcray profile`)."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

import msgspec

from hpcray.platform.stacks import after_fork, interesting_frames, is_users
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.core_worker import CoreWorker, current

# ------------------------------------------------------------ stack sampler
# A sampling profiler inside a process: which Python code its threads run, by wall-clock and by CPU time.
#
# A sample weighs as long as it is after the one before. So C code that keeps the interpreter's lock, and with it the
# sampler, counts in full, for the line that has called it. What the CPU time of a thread is, the kernel says.


_MAX_DEPTH = 200
_CPU_CLOCK = 6  # CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED of <linux/posix-timers.h>
_UNNAMED = "not of Python"
INTERNAL = "(hpcray)"
"""Stands for the frames of a task in which none is the user's: arguments that are read, results that are sent."""

Labels = Callable[[Mapping[int, FrameType]], tuple[Mapping[int, str], str]]
"""Finds from the innermost frames of all threads, by ident, what each one works for (none: for nothing), and what is
said where none works for anything ("": nothing)."""


class StackSampler:
    """Samples the threads of its process but for the calling one.

    Args:
        labels: see `Labels`.
        everything: also hpcray's threads and frames.
    """

    def __init__(self, labels: Labels, everything: bool) -> None:
        self._labels = labels
        self._everything = everything
        self._stacks: dict[tuple[Any, ...], list[float]] = {}
        self._idle: dict[str, float] = {}
        self._threads: dict[int, tuple[str, int]] = {}
        self._cpu: dict[int, float] = {}
        self._seconds = self._gap = self._python = 0.0
        self._samples = 0

    def run(self, seconds: float, rate: float, stop: threading.Event) -> dict[str, Any]:
        """Sample for so long, or until `stop` is set, and return `answer()` with "cost", our own CPU time."""
        began, own, whole = time.perf_counter(), time.thread_time(), time.process_time()
        last = due = began
        self._look(0.0)
        while True:
            due += 1 / rate
            now = time.perf_counter()
            if due < now:  # late: what was missed is in the weight of the next sample
                due = now
            ended = stop.wait(min(due, began + seconds) - now)
            now = time.perf_counter()
            self._look(now - last)
            self._gap = max(self._gap, now - last)
            last = now
            if ended or now - began >= seconds:
                break
        self._seconds = last - began
        cost = time.thread_time() - own
        return {**self.answer(), "cost": cost, "cpu": max(0.0, time.process_time() - whole - cost)}

    def answer(self) -> dict[str, Any]:
        """Return what was seen.

        Returns:
            "seconds", "samples", "gap" (longest time between two), "python" (CPU seconds of threads that Python knows),
            "idle" (seconds by what was said of them), "stacks": rows [label, line of the innermost frame, seconds, CPU
            seconds, samples, frames], those with most seconds first. Frames are [file, line of the function, function].
        """
        merged: dict[tuple[Any, ...], list[float]] = {}
        for (label, line, codes), found in self._stacks.items():
            frames = self._shown(label, codes)
            if frames:
                row = merged.setdefault((label, line, frames), [0.0, 0.0, 0])
                for place, value in enumerate(found):
                    row[place] += value
        rows = [[label, line, *found, list(frames)] for (label, line, frames), found in merged.items()]
        return {
            "seconds": self._seconds,
            "samples": self._samples,
            "gap": self._gap,
            "python": self._python,
            "idle": self._idle,
            "stacks": sorted(rows, key=lambda row: (-row[2], -row[3])),
        }

    def _look(self, elapsed: float) -> None:
        """Take a sample that counts for so many seconds."""
        frames = sys._current_frames()
        del frames[threading.get_ident()]
        labels, nothing = self._labels(frames)
        if nothing and not labels and elapsed:
            self._idle[nothing] = self._idle.get(nothing, 0.0) + elapsed
        for ident, frame in frames.items():
            name, cpu = self._cpu_since(ident)
            label = labels.get(ident)
            if not elapsed or not (cpu or label or self._everything):
                continue
            self._python += cpu
            if label is None:
                if name.startswith("hpcray-") and not self._everything:
                    continue
                label = f"(thread {name})"
            line, codes = frame.f_lineno or 0, _codes_of(frame)
            row = self._stacks.get(key := (label, line, codes))
            if row is None:
                row = self._stacks[key] = [0.0, 0.0, 0]
            row[0] += elapsed if ident in labels or self._everything else cpu
            row[1] += cpu
            row[2] += 1
        self._samples += bool(elapsed)

    def _cpu_since(self, ident: int) -> tuple[str, float]:
        """The name of a thread, and its CPU seconds since the last sample."""
        known = self._threads.get(ident)
        if known is None:
            self._threads = {one.ident or 0: (one.name, one.native_id or 0) for one in threading.enumerate()}
            known = self._threads.get(ident, (_UNNAMED, 0))
        name, native = known
        if not native:
            return name, 0.0
        try:
            now = time.clock_gettime(~native << 3 | _CPU_CLOCK)
        except OSError:  # it has ended; another one may get its ident
            self._threads.pop(ident, None)
            return name, 0.0
        before = self._cpu.get(native, now)
        self._cpu[native] = now
        return name, now - before

    def _shown(self, label: str, codes: tuple[CodeType, ...]) -> tuple[tuple[str, int, str], ...]:
        """The frames of a stack, outermost first; none where there is nothing to show."""
        frames: list[list[Any]] = [
            [code.co_filename, code.co_firstlineno, getattr(code, "co_qualname", code.co_name)]
            for code in reversed(codes)
        ]
        if not self._everything:
            frames = after_fork(frames)
            if not any(map(is_users, frames)):
                return () if label.startswith("(") else (("", 0, INTERNAL),)
            frames = list(interesting_frames(frames))
        return tuple((file, line, function) for file, line, function in frames)


def _codes_of(frame: FrameType | None) -> tuple[CodeType, ...]:
    """The code of a stack, innermost first; of a very deep one the innermost."""
    found: list[CodeType] = []
    while frame is not None and len(found) < _MAX_DEPTH:
        found.append(frame.f_code)
        frame = frame.f_back
    return tuple(found)


# ------------------------------------------------------------ memory growth
# Memory that a process has allocated since a moment and not freed, by the line that did it (`tracemalloc`).
#
# Python's allocators are traced, those of NumPy's arrays too; other C and C++ code is not, PyTorch's tensors among it:
# what the process has grown by in all says how much that is.


_DEPTH = 12
"""Frames of an allocation that are remembered. Each costs time and memory, at every allocation."""


class _Tracing:
    """State of this process: how many look on, and whether it was us that switched it on."""

    lock = threading.Lock()
    users = 0
    ours = False


class MemoryGrowth:
    """Memory that this process allocates from now on, until `answer` or `close`."""

    def __init__(self) -> None:
        with _Tracing.lock:
            if not _Tracing.users:
                _Tracing.ours = not tracemalloc.is_tracing()
                if _Tracing.ours:
                    tracemalloc.start(_DEPTH)
            _Tracing.users += 1
            self._open = True
            fresh = _Tracing.ours and _Tracing.users == 1
        self._before = None if fresh else tracemalloc.take_snapshot()
        self._began = time.perf_counter()
        self._rss = resident_bytes()

    def answer(self, everything: bool) -> dict[str, Any]:
        """Return what has been allocated since, and is still there. Ends the tracing; may take seconds.

        Args:
            everything: also hpcray's frames.

        Returns:
            "seconds", "traced" (bytes by which what is traced has grown), "before" and "after": bytes resident of the
            process, its own ("anonymous") and shared memory ("shared"); "stacks": rows ["", line of the innermost
            frame, bytes, 0.0, blocks, frames], those with most bytes first; frames are [file, line, ""].
        """
        seconds, after = time.perf_counter() - self._began, resident_bytes()
        snapshot = tracemalloc.take_snapshot()
        self.close()
        found = snapshot.compare_to(self._before, "traceback") if self._before else snapshot.statistics("traceback")
        merged: dict[tuple[Any, ...], list[int]] = {}
        for one in found:
            size = getattr(one, "size_diff", None) if self._before else one.size
            count = getattr(one, "count_diff", None) if self._before else one.count
            if size or count:
                frames = _shown([[frame.filename, frame.lineno, ""] for frame in one.traceback], everything)
                row = merged.setdefault(frames, [0, 0])
                row[0] += size or 0
                row[1] += count or 0
        rows = [["", frames[-1][1], size, 0.0, count, list(frames)] for frames, (size, count) in merged.items()]
        return {
            "seconds": seconds,
            "traced": sum(row[2] for row in rows),
            "before": self._rss,
            "after": after,
            "stacks": sorted(rows, key=lambda row: -row[2]),
        }

    def close(self) -> None:
        """End the tracing, unless others look on or the program has started it."""
        with _Tracing.lock:
            if self._open:
                self._open = False
                _Tracing.users -= 1
                if not _Tracing.users and _Tracing.ours:
                    tracemalloc.stop()


def resident_bytes() -> dict[str, int]:
    """The resident bytes of this process: its own ("anonymous"), and of shared memory ("shared")."""
    found = {"anonymous": 0, "shared": 0}
    names = {"RssAnon": "anonymous", "RssShmem": "shared"}
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in names:
                found[names[name]] = int(rest.split()[0]) << 10
    return found


def _shown(frames: list[list[Any]], everything: bool) -> tuple[tuple[str, int, str], ...]:
    if not everything:
        frames = list(interesting_frames(after_fork(frames))) or frames
    return tuple((file, line, function) for file, line, function in frames)


# ------------------------------------------------------------ process profile


_KEPT = 30.0
"""Seconds for which the result waits for its asker."""
_MOST = 4
"""Profiles that are made at the same time, at most."""
IDLE, AWAITS, SETS_UP = "idle", "coroutines wait", "sets up its runtime_env"


class ProfileOptions(msgspec.Struct):
    """A request for a profile.

    Attributes:
        seconds: for how long. rate: samples per second. memory: what is allocated and not freed, instead of stacks.
        task: only while this function runs; "": always. everything: also hpcray's own threads and frames.
    """

    seconds: float
    rate: float = 100.0
    memory: bool = False
    task: str = ""
    everything: bool = False


class ProcessProfiler:
    """The profiles of one process. Costs nothing but while one is made.

    Args:
        labels: what the threads of this process work for.
        send: sends the reply to a question, from any thread.
    """

    def __init__(self, labels: Callable[[str], Labels], send: Callable[[bytes, m.GcsReply], None]) -> None:
        self._labels = labels
        self._send = send
        self._running: dict[bytes, _Profile] = {}

    def start(self, token: bytes, options: ProfileOptions) -> dict[str, Any]:
        """Begin a profile, which ends by itself. `answer_later` gets it by its token."""
        if token not in self._running:
            if len(self._running) >= _MOST:
                raise RuntimeError(f"{_MOST} profiles of this process are being made already")
            profile = _Profile(options, self._labels(options.task), lambda: self._running.pop(token, None))
            self._running[token] = profile
            try:
                profile.start()
            except RuntimeError:  # no room for one more thread
                profile.close()
                raise
        return {"pid": os.getpid()}

    def answer_later(self, src: bytes, req: int, token: bytes, most: int) -> None:
        """End a profile now, and send it to `src`: its `most` largest stacks, "omitted", what the others weigh, and
        "problem": why there is nothing, "" where there is."""

        def send(found: dict[str, Any] | str) -> None:
            if isinstance(found, str):
                kept: dict[str, Any] = {"problem": found}
            else:
                omitted = sum(row[2] for row in found["stacks"][most:])
                kept = {**found, "problem": "", "stacks": found["stacks"][:most], "omitted": omitted}
            self._send(src, m.GcsReply(req, True, msgspec.msgpack.encode(kept)))

        profile = self._running.get(token)
        if profile is None:
            send("there is no such profile")
        else:
            profile.finish(send)


class _Profile:
    """One profile, in a thread that ends when its result has been sent, or no one has asked for it."""

    def __init__(self, options: ProfileOptions, labels: Labels, forget: Callable[[], object]) -> None:
        self._options = options
        self._forget = forget
        self._stop, self._wanted = threading.Event(), threading.Event()
        self._replies: list[Callable[[dict[str, Any] | str], None]] = []
        self._growth = MemoryGrowth() if options.memory else None
        self._sampler = StackSampler(labels, options.everything)
        self._thread = threading.Thread(target=self._run, name="hpcray-profile", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, reply: Callable[[dict[str, Any] | str], None]) -> None:
        self._replies.append(reply)
        self._stop.set()
        self._wanted.set()

    def close(self) -> None:
        self._forget()
        if self._growth is not None:
            self._growth.close()

    def _run(self) -> None:
        try:
            found: dict[str, Any] | str = self._measure()
        except Exception as error:  # the asker is told
            found = f"{type(error).__name__}: {error}"
        finally:
            if self._growth is not None:
                self._growth.close()
        self._wanted.wait(_KEPT)
        self._forget()
        for reply in self._replies:
            reply(found)

    def _measure(self) -> dict[str, Any]:
        options = self._options
        if self._growth is None:
            return self._sampler.run(options.seconds, options.rate, self._stop)
        self._stop.wait(options.seconds)
        return self._growth.answer(options.everything)


def labels_of(process: CoreWorker, task: str) -> Labels:
    """Return what the threads of this process work for: tasks and calls by name, and the program.

    Args:
        process: a driver or worker.
        task: only tasks and calls of this name count; "": all do.
    """
    main = threading.main_thread().ident or 0
    holders: dict[CodeType, bool] = {}

    def of_driver(frames: Mapping[int, FrameType]) -> tuple[Mapping[int, str], str]:
        return ({} if task else {main: "(driver)"}), ""

    def of_worker(frames: Mapping[int, FrameType]) -> tuple[Mapping[int, str], str]:
        worker = current.worker
        assert worker is not None
        found: dict[int, str] = {}
        for ident, local in list(worker.thread_locals.items()):
            if (msg := local.get("task")) is not None:
                found[ident] = worker.running_name(msg)
        actor = worker.actor
        if actor is not None and actor.loop is not None:
            for ident, frame in frames.items():
                if ident not in found and (call := _coroutine_call(frame, holders)) is not None:
                    found[ident] = worker.running_name(call)
        nothing = IDLE
        if worker.environment.since:
            nothing = SETS_UP
        elif actor is not None and not actor.idle():
            nothing = AWAITS
        if task:
            return {ident: name for ident, name in found.items() if names_task(task, name)}, "" if found else nothing
        return found, nothing

    return of_worker if current.worker is not None else of_driver


def names_task(wanted: str, name: str) -> bool:
    """True if this name of a task or call is the wanted one, or ends with it behind a dot."""
    return name == wanted or name.rpartition(".")[2] == wanted


def _coroutine_call(frame: FrameType | None, holders: dict[CodeType, bool]) -> m.ActorCall | None:
    """The call of an async actor whose coroutine is on this stack."""
    while frame is not None:
        code = frame.f_code
        holds = holders.get(code)
        if holds is None:
            ours = code.co_filename.endswith("concurrency_groups.py") and "msg" in code.co_varnames
            holds = holders[code] = ours and bool(code.co_flags & inspect.CO_COROUTINE)
        if holds:
            msg = frame.f_locals.get("msg")
            return msg if isinstance(msg, m.ActorCall) else None
        frame = frame.f_back
    return None
