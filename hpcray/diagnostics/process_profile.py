"""Profiles of this process, made in a thread of its own while one is asked for (`hpcray profile`)."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

import msgspec

from hpcray.diagnostics.memory_growth import MemoryGrowth
from hpcray.diagnostics.stack_sampler import Labels, StackSampler
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.core_worker import CoreWorker, current

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
        self._reply: Callable[[dict[str, Any] | str], None] = lambda found: None
        self._growth = MemoryGrowth() if options.memory else None
        self._sampler = StackSampler(labels, options.everything)
        self._thread = threading.Thread(target=self._run, name="hpcray-profile", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, reply: Callable[[dict[str, Any] | str], None]) -> None:
        self._reply = reply
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
        self._reply(found)

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
