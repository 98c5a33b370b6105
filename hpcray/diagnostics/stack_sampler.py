"""A sampling profiler inside a process: which Python code its threads run, by wall-clock and by CPU time.

A sample weighs as long as it is after the one before. So C code that keeps the interpreter's lock, and with it the
sampler, counts in full, for the line that has called it. What the CPU time of a thread is, the kernel says.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

from hpcray.platform.stacks import after_fork, interesting_frames, is_users

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
