"""An actor and the announced end of its job: restored when it starts, told when the job drains, and saved."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from hpcray.base.drain_errors import JobDrainingError
from hpcray.base.ids import HEAD
from hpcray.host import checkpoints
from hpcray.runtime.actor_kinds import MARK
from hpcray.wire import messages as m
from hpcray.wire.serialization import serialize_error

if TYPE_CHECKING:
    from hpcray.runtime.actor_host import ActorHost
    from hpcray.runtime.worker import Worker

SAVE, RESTORE = "__hpcray_checkpoint__", "__hpcray_restore__"
URGENT = (m.SaveActor, m.Drain)
"""What goes before all calls that wait."""
_OPEN_SHARE = 0.5
_LOOK = 0.002


class ActorEnd:
    """Of one worker, which may be an actor."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._ending = worker.process.ending
        self._saved = False
        self._marked_called = False
        self._ending.on_begin.append(self._begin)

    def restore(self, host: ActorHost) -> None:
        """Give a named actor that has just been constructed the newest checkpoint of its name."""
        hook = getattr(type(host.instance), RESTORE, None)
        if hook is None or not host.spec.name:
            return
        found = checkpoints.latest(self._worker.process.run.checkpoints, self._directory(host))
        if found is not None:
            _run(host, lambda: hook(host.instance, found))

    def asked(self, _: bytes, msg: m.SaveActor) -> None:
        """The head wants its state saved (lock held)."""
        host = self._worker.actor
        if host is None or getattr(type(host.instance), SAVE, None) is None:
            self._tell("", "")
        else:
            self._worker.urgent(msg)

    def take(self, msg: Any) -> None:
        """Do what is urgent, on the main thread, between two calls."""
        host = self._worker.actor
        if host is None:
            return
        self._call_marked(host)
        if type(msg) is m.SaveActor:
            self._save(host)

    def before_leaving(self, host: ActorHost) -> None:
        """The actor ends while the job drains: nobody will ask it any more."""
        if self._ending.reason and getattr(type(host.instance), SAVE, None) is not None:
            self._save(host)

    # ------------------------------------------------------------ inside

    def _begin(self) -> None:
        host = self._worker.actor
        if host is not None and _marked(host.instance):
            self._worker.urgent(m.Drain("", 0.0))

    def _call_marked(self, host: ActorHost) -> None:
        if self._marked_called:
            return
        self._marked_called = True
        for method in _marked(host.instance):
            try:
                _run(host, partial(method, host.instance, self._ending.left()))
            except BaseException:
                traceback.print_exc()

    def _directory(self, host: ActorHost) -> str:
        job = self._worker.process.job
        own = host.spec.namespace if job is None or host.spec.namespace != job.namespace else ""
        return checkpoints.directory_name(host.spec.name, own)

    def _save(self, host: ActorHost) -> None:
        if self._saved:
            return
        self._saved = True
        host.call = self._refuse
        host.route_by_group = lambda: None  # type: ignore[method-assign]
        path = error = ""
        root = self._worker.process.run.checkpoints
        if not host.spec.name:
            error = "it has no name, so no later run could find it; hint: .options(name=...)"
        elif not root:
            error = "no checkpoint directory is known; hint: HPCRAY_CHECKPOINT_DIR"
        else:
            self._await_open_calls(host)
            try:
                with checkpoints.writing(root, self._directory(host)) as path:
                    _run(host, lambda: getattr(type(host.instance), SAVE)(host.instance, path))
            except BaseException as raised:
                traceback.print_exc()
                error = f"{type(raised).__name__}: {raised}"
        with self._worker.engine.lock:
            self._tell("" if error else path, error and f"{host.spec.class_name} {host.spec.name!r}: {error}")
            self._worker.engine.flush()

    def _await_open_calls(self, host: ActorHost) -> None:
        """Threads and coroutines of calls that have begun get half of the time left; then their state is what it is."""
        until = time.monotonic() + _OPEN_SHARE * self._ending.left()
        while time.monotonic() < until:
            if host.idle():
                return
            time.sleep(_LOOK)

    def _refuse(self, src: bytes, msg: m.ActorCall) -> None:
        host = self._worker.actor
        name = f"{host.spec.class_name}.{msg.method}" if host is not None else msg.method
        error = serialize_error(
            JobDrainingError(
                f"call {name!r} was not run: the job drains ({self._ending.reason}) and the actor's checkpoint is "
                "written; hint: end the program, the next run goes on from there"
            )
        )
        with self._worker.engine.lock:
            returns = [m.Returned(error) for _ in range(abs(msg.num_returns))]
            self._worker.engine.send(src, m.TaskReply(msg.task, 1, returns, 0))
            self._worker.engine.flush()

    def _tell(self, path: str, error: str) -> None:
        self._worker.engine.send(HEAD, m.ActorSaved(path, error))


def _marked(instance: Any) -> list[Callable[..., Any]]:
    """The methods of its class that `on_drain` decorates."""
    return [member for _, member in inspect.getmembers(type(instance), inspect.isfunction) if hasattr(member, MARK)]


def _run(host: ActorHost, function: Callable[[], Any]) -> None:
    """Run a hook: on the actor's event loop if it has one."""
    loop = host.loop
    if loop is None:
        function()
        return

    async def run() -> None:
        result = function()
        if inspect.isawaitable(result):
            await result

    if threading.current_thread() is threading.main_thread():
        asyncio.run_coroutine_threadsafe(run(), loop).result()
