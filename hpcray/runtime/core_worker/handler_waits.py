"""Waits of signal handlers that have interrupted a wait of their own thread, and waits that outlast the session."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from time import monotonic, sleep
from typing import Any, NoReturn, Protocol

from hpcray.common.exceptions import RaySystemError
from hpcray.core.core_worker.object_table import Waiter

IDLE, FOREGROUND, BACKGROUND = 0, 1, 2
REENTRANT_WAIT = "a destructor or signal handler that interrupted hpcray itself cannot wait"


_exit_began: list[bool] = []


def begin_exit() -> None:
    """Take note that the interpreter ends: all threads that still wait are daemons, which it leaves where they are."""
    _exit_began.append(True)


def end_wait(engine: Engine) -> NoReturn:
    """End a wait of this thread, as the session has ended: with an error, or with the interpreter (lock held)."""
    if _exit_began:
        while engine.holds_lock():
            engine.lock.release()
        while True:
            sleep(3600)
    raise RaySystemError("hpcray.shutdown() was called while this thread waited")


class Engine(Protocol):
    """`IoEngine` as it is seen from here; described there."""

    lock: Any
    holds_lock: Callable[[], bool]
    asleep: set[int]
    closed: bool
    driver: int
    driving: int
    parked: list[Waiter]
    park_of: dict[int, Waiter]
    sleep_until: float

    def wait(self, waiter: Waiter, deadline: float | None = None) -> bool: ...

    def turn(self, deadline: float | None) -> bool: ...

    def listen(self) -> None: ...

    def wake(self) -> None: ...


def wait_in_handler(engine: Engine, waiter: Waiter, deadline: float | None) -> bool:
    """`IoEngine.wait` for a handler. The wait that it interrupted cannot go on before the handler returns: if that one
    drives, the handler drives in its place, and if it is parked, no thread hands over to it meanwhile.

    Returns:
        False when the deadline has passed.

    Raises:
        RaySystemError: it was no wait: the handler interrupts a table update.
    """
    me = get_ident()
    engine.lock.release()
    try:
        if engine.holds_lock():
            raise RaySystemError(REENTRANT_WAIT)
    finally:
        engine.lock.acquire()
    drives, was_asleep, sleep_until = engine.driving == me, me in engine.asleep, engine.sleep_until
    parked = engine.park_of.pop(me, None)
    if parked is not None and parked in engine.parked:
        engine.parked.remove(parked)
    try:
        if drives or (parked is not None and parked.turn):
            while waiter.count > 0 and not engine.closed and engine.turn(deadline):
                pass
        else:
            engine.wait(waiter, deadline)
        return deadline is None or monotonic() < deadline
    finally:
        if was_asleep:
            engine.asleep.add(me)
        if parked is not None:
            engine.park_of[me] = parked
        if drives:
            engine.driving, engine.sleep_until = me, sleep_until
            engine.wake()  # what the interrupted wait sleeps for may have come meanwhile
        elif parked is not None and parked.count > 0 and not parked.turn:
            engine.parked.append(parked)
            if engine.driver == IDLE:
                engine.listen()  # the background thread hands over to it
            elif engine.driver == BACKGROUND:
                engine.wake()
