"""`max_calls`: a worker leaves after so many calls of one function, and nothing is lost.

The last call gives back what else was sent to this worker before it starts, and what comes later is given back too. Its
lessee hears of it before the reply, and keeps the lease: a raylet would grant the worker to somebody else.
After it the worker says that it leaves, and waits for what others may still want of it: its own unfinished tasks, and
objects it owns that others refer to. Meanwhile its CPU is lent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcray.core.owner.table import PENDING, Waiter
from hpcray.runtime.engine import monotonic
from hpcray.wire import messages as m

if TYPE_CHECKING:
    from hpcray.runtime.worker import Worker

_LOOK_AGAIN = 0.02


class Retire:
    """In the worker's queue behind its last call."""


def counted(worker: Worker, function: Callable[..., Any], limit: int) -> Callable[..., Any]:
    """The function, with its calls counted: number `limit` is the worker's last."""
    left = limit

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            _begin(worker)
        return function(*args, **kwargs)

    made: Any = call
    COUNTED.add(made.__code__)
    return call


COUNTED: set[Any] = set()
"""Code of ours between a task and its function: an interrupt there is one of user code (`worker.in_user_code`)."""


def _begin(worker: Worker) -> None:
    """Take no more work (called by the task that is the last one)."""
    with worker.engine.lock:
        worker.give_back(None, False)
        worker.engine.send(worker.lessee, m.TakenBack([], True, True))
        worker.process.handlers[m.PushTask] = lambda src, msg: worker.engine.send(src, m.TakenBack([msg.task], False))
        worker.queue.append((b"", Retire()))
        worker.engine.flush()


def finish(worker: Worker) -> None:
    """The last reply is on its way: say that we leave, and do so when nobody needs us any more."""
    engine, table = worker.engine, worker.process.table
    with engine.lock:
        engine.flush()
        while table.unacked:  # the reply waits for them
            engine.wait(Waiter(), monotonic() + _LOOK_AGAIN)
        # Only its answer tells that our replies have been read: a broken connection would lose them.
        noticed = Waiter()
        worker.process.handlers[m.TakeBack] = lambda src, msg: _noticed(worker, noticed) if msg.leaving else None
        engine.send(worker.lessee, m.TakenBack([], False, True))
        engine.wait(noticed)
        if _needed(worker):
            worker.lend()
            while _needed(worker):
                engine.wait(Waiter(), monotonic() + _LOOK_AGAIN)
    worker.leave("it has had its max_calls")


def _noticed(worker: Worker, waiter: Waiter) -> None:
    waiter.count = 0
    worker.engine.notify(waiter)


def _needed(worker: Worker) -> bool:
    """Whether a task of ours is unfinished, or an object of ours is referred to elsewhere (lock held)."""
    worker.process.drain()
    me = worker.process.me
    entries = worker.process.table.entries.items()
    return any(entry.borrowers or entry.state == PENDING for oid, entry in entries if oid[:8] == me)
