"""The driver of a submitted function: `python -m hpcray.cluster.call FOLDER`, run by rank 0 as any other program."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import cloudpickle

from hpcray.base.errors import make_task_error
from hpcray.cluster.outcome import CALL, CHECKPOINT, DRIVER, ERROR, OUTCOME, VALUE, Call, Outcome, read_pickle
from hpcray.cluster.outcome import write_pickle as write
from hpcray.host.address import node_ip_address

CHECKPOINT_SIGNAL = signal.SIGUSR2
_CHECKPOINTED = 75  # EX_TEMPFAIL of sysexits.h: try again later


def main(folder: Path) -> int:
    """Call the function, write what became of it; the exit code."""
    call: Call = read_pickle(folder / CALL)
    try:
        function, args, kwargs = call.load()
        _offer_checkpoint(folder, function, args, kwargs)
        outcome = Outcome(VALUE, 0, cloudpickle.dumps(function(*args, **kwargs)))
    except _CheckpointTaken:
        return _CHECKPOINTED
    except BaseException as error:  # SystemExit too is told, not obeyed
        traceback.print_exc()
        told = make_task_error(call.name, error, os.getpid(), node_ip_address(), dumps=cloudpickle.dumps)
        outcome = Outcome(ERROR, 1, cloudpickle.dumps(told))
    write(folder / OUTCOME, outcome)
    return outcome.code


class _CheckpointTaken(BaseException):
    """Ends the function whose checkpoint is written. No `except Exception` of the user's code may stop it."""


def checkpoint_of(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The method that makes a checkpoint of a call, in submitit's two spellings; None where there is none."""
    found = getattr(function, "__submitit_checkpoint__", None) or getattr(function, "checkpoint", None)
    return found if callable(found) else None


def _offer_checkpoint(
    folder: Path, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """On SIGUSR2 the function's own `checkpoint(*args, **kwargs)` says what to call next time."""
    checkpoint = checkpoint_of(function)
    if checkpoint is None:
        return

    def take(number: int, frame: FrameType | None) -> None:
        again = checkpoint(*args, **kwargs)
        if again is not None:
            name = getattr(again.function, "__name__", type(again.function).__name__)
            blob = cloudpickle.dumps((again.function, again.args, again.kwargs))
            write(folder / CHECKPOINT, Call(name, tuple(sys.path), blob))
        raise _CheckpointTaken

    signal.signal(CHECKPOINT_SIGNAL, take)
    with open(folder / DRIVER, "w") as file:
        json.dump({"pid": os.getpid(), "host": socket.gethostname()}, file)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
