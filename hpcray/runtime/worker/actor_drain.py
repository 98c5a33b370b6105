"""An actor in a drain, the announced end of its job, or on a node that leaves the job: its state is saved, and restored
later. In a drain its hooks run, too."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from hpcray.common.exceptions import JobDrainingError
from hpcray.common.ids import HEAD
from hpcray.platform import checkpoints
from hpcray.protocol import messages as m
from hpcray.protocol.serialization import serialize_error
from hpcray.runtime.core_worker.actor_submitter import MARK
from hpcray.runtime.worker.context import ActorContext, WorkerContext

SAVE, RESTORE = "__hpcray_checkpoint__", "__hpcray_restore__"
URGENT = (m.SaveActor, m.Drain)
"""Messages that go before all calls that wait."""
_OPEN_CALLS_SHARE = 0.5
"""Share of the time left that open calls get before the state is saved."""
_OPEN_CALLS_TIME = 5.0
"""Seconds that they get on a node that leaves."""
_IDLE_CHECK = 0.002
"""Seconds between two looks for their end."""


class ActorDrain:
    """The checkpoints and drain hooks of the actor that one worker may become."""

    def __init__(self, worker: WorkerContext) -> None:
        self._worker = worker
        self._client = worker.process.drain_client
        self._saved = False
        self._lost = ""  # why there is no checkpoint
        self._marked_called = False
        self._client.on_begin.append(self._begin)
        self._moves = self._moved = False  # this node leaves; the state is saved, as far as it could be

    def restore(self, actor: ActorContext) -> None:
        """Give a named actor that has just been constructed the newest checkpoint of its name."""
        hook = getattr(type(actor.instance), RESTORE, None)
        if hook is None or not actor.spec.name:
            return
        found = checkpoints.latest(self._worker.process.place.run.checkpoints, self._directory(actor))
        if found is not None:
            _run(actor, lambda: hook(actor.instance, found))

    def on_save_actor(self, _: bytes, msg: m.SaveActor) -> None:
        """The head wants its state saved (lock held)."""
        actor = self._worker.actor
        if actor is None or getattr(type(actor.instance), SAVE, None) is None:
            self._send_saved("", "")
        else:
            self._worker.enqueue_first(msg)

    def run_urgent(self, msg: Any) -> None:
        """Handle a drain or a request to save, on the main thread, between two calls."""
        actor = self._worker.actor
        if actor is None:
            return
        if not self._moves:
            self._call_marked(actor)
        if type(msg) is m.SaveActor:
            self._save(actor)

    def save_state(self) -> Callable[[], bool]:
        """This node leaves the job: save the state of an actor that restarts elsewhere, between two calls (lock held).

        Returns:
            What returns whether that is done.
        """
        actor = self._worker.actor
        restarts = actor is not None and bool(actor.spec.name) and actor.spec.max_restarts != 0
        hook = getattr(type(actor.instance), SAVE, None) if actor is not None else None
        if not self._moves and restarts and hook is not None and not self._saved and not self._client.reason:
            self._moves = True
            self._worker.enqueue_first(m.SaveActor())
        return lambda: self._moved or not self._moves

    def before_leaving(self, actor: ActorContext) -> None:
        """Save the state of an actor that ends while the job drains."""
        if self._client.reason and getattr(type(actor.instance), SAVE, None) is not None:
            self._save(actor)

    # ------------------------------------------------------------ inside

    def _begin(self) -> None:
        actor = self._worker.actor
        if actor is not None and _marked(actor.instance):
            self._worker.enqueue_first(m.Drain("", 0.0))

    def _call_marked(self, actor: ActorContext) -> None:
        if self._marked_called:
            return
        self._marked_called = True
        for method in _marked(actor.instance):
            try:
                _run(actor, partial(method, actor.instance, self._client.seconds_left()))
            except BaseException:
                traceback.print_exc()

    def _directory(self, actor: ActorContext) -> str:
        job = self._worker.process.place.job
        own = actor.spec.namespace if job is None or actor.spec.namespace != job.namespace else ""
        return checkpoints.directory_name(actor.spec.name, own)

    def _save(self, actor: ActorContext) -> None:
        if self._saved:
            return
        self._saved = True
        actor.refuse_calls(_leave_unanswered if self._moves else self._refuse)
        path = error = ""
        root = self._worker.process.place.run.checkpoints
        if not actor.spec.name:
            error = "it has no name, so no later run could find it; hint: .options(name=...)"
        elif not root:
            error = "no checkpoint directory is known; hint: HPCRAY_CHECKPOINT_DIR"
        else:
            self._await_open_calls(
                actor, _OPEN_CALLS_TIME if self._moves else _OPEN_CALLS_SHARE * self._client.seconds_left()
            )
            try:
                with checkpoints.writing(root, self._directory(actor)) as path:
                    _run(actor, lambda: getattr(type(actor.instance), SAVE)(actor.instance, path))
            except BaseException as raised:
                traceback.print_exc()
                error = f"{type(raised).__name__}: {raised}"
        self._lost = error
        error = error and f"{actor.spec.class_name} {actor.spec.name!r}: {error}"
        self._moved = True
        if self._moves:
            if error:
                print(f"hpcray: the state of an actor is lost with its node, which leaves: {error}", file=sys.stderr)
            return
        with self._worker.engine.lock:
            self._send_saved("" if error else path, error)
            self._worker.engine.flush()

    def _await_open_calls(self, actor: ActorContext, seconds: float) -> None:
        """Threads and coroutines of calls that have begun get so much time; then their state is what it is."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if actor.idle():
                return
            time.sleep(_IDLE_CHECK)

    def _refuse(self, src: bytes, msg: m.ActorCall) -> None:
        """Answer a call that came after `_save` has begun; on the main thread, so after its end."""
        actor = self._worker.actor
        name = f"{actor.spec.class_name}.{msg.method}" if actor is not None else msg.method
        if self._lost:
            why, _, hint = self._lost.partition("; hint: ")
            state = f"the actor has no new checkpoint: {why}"
            hint = hint or "end the program, the next run goes on from the checkpoint before, if there is one"
        else:
            state = "the actor's checkpoint is written"
            hint = "end the program, the next run goes on from there"
        error = serialize_error(
            JobDrainingError(
                f"call {name!r} was not run: the job drains ({self._client.reason}) and {state}; hint: {hint}"
            )
        )
        with self._worker.engine.lock:
            returns = [m.Returned(error) for _ in range(abs(msg.num_returns))]
            self._worker.engine.send(src, m.TaskReply(msg.task, 1, returns, 0))
            self._worker.engine.flush()

    def _send_saved(self, path: str, error: str) -> None:
        self._worker.engine.send(HEAD, m.ActorSaved(path, error))


def _leave_unanswered(src: bytes, msg: m.ActorCall) -> None:
    """A call that came after the state was saved: its caller sends it again to the restarted actor, if it may."""


def _marked(instance: Any) -> list[Callable[..., Any]]:
    """The methods of its class that `on_drain` decorates."""
    return [member for _, member in inspect.getmembers(type(instance), inspect.isfunction) if hasattr(member, MARK)]


def _run(actor: ActorContext, function: Callable[[], Any]) -> None:
    """Run a hook: on the actor's event loop if it has one."""
    loop = actor.loop
    if loop is None:
        function()
        return

    async def run() -> None:
        result = function()
        if inspect.isawaitable(result):
            await result

    if threading.current_thread() is threading.main_thread():
        asyncio.run_coroutine_threadsafe(run(), loop).result()
