"""Batch jobs. Here: calls and outcomes, and the files in which a job's processes exchange them. All files lie in the
job's own 0700 folder; nothing is read from elsewhere.

    call.pkl         the function and its arguments, for the driver
    driver.json      the driver's pid and host, and whether its function can write a checkpoint
    outcome.pkl      the result, as the driver left it
    checkpoint.pkl   the call for the next start of the job
    cancelled        exists once the job was cancelled
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from hpcray.platform.private_files import read_private_file, write_private_file

CALL, DRIVER, OUTCOME, CHECKPOINT, CANCELLED = ("call.pkl", "driver.json", "outcome.pkl", "checkpoint.pkl", "cancelled")
VALUE, ERROR, EXIT, LOST = "value", "error", "exit", "lost"

# Files of a job in PBS or Flux; submitit has the job's id in their names, which the submission does not know.
STEM, LAUNCH = "batch", "launch.pkl"
SCRIPT_OUTPUT = "script.out"
"""File of the output of the batch script itself: why Python did not start."""


@dataclass(frozen=True)
class PickledCall:
    """A function with its arguments, pickled.

    Attributes:
        name: the function's name, for messages.
        paths: entries for `sys.path` that the function's modules need.
        blob: (function, args, kwargs), by cloudpickle.
    """

    name: str
    paths: tuple[str, ...]
    blob: bytes

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> PickledCall:
        """Pickle a call; functions and classes of the calling script travel with it."""
        name = getattr(function, "__name__", type(function).__name__)
        paths = tuple(os.path.abspath(path) if path else os.getcwd() for path in sys.path)
        return cls(name, tuple(dict.fromkeys(paths)), cloudpickle.dumps((function, args, kwargs)))

    def load(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Unpickle the function and its arguments, with `paths` added to `sys.path`."""
        sys.path += [path for path in self.paths if path not in sys.path]
        function, args, kwargs = pickle.loads(self.blob)
        return function, args, kwargs


@dataclass(frozen=True)
class JobOutcome:
    """The end of a job.

    Attributes:
        kind: "value" (of a function), "error" (it raised), "exit" (of a script), "lost" (it ended without a result).
        code: exit code of the launch; 128 + n for signal n.
        blob: the pickled value, or the pickled `RayTaskError`.
        ended_by: "SIGTERM" after a request to end, "time" at the time limit, else "".
    """

    kind: str
    code: int = 0
    blob: bytes = b""
    ended_by: str = ""

    @property
    def ok(self) -> bool:
        """True if the job succeeded."""
        return self.kind == VALUE or (self.kind == EXIT and self.code == 0)


def write_pickle(path: Path, value: Any) -> None:
    """Write a file atomically, readable by this user only."""
    write_private_file(str(path), cloudpickle.dumps(value))


def read_pickle(path: Path) -> Any:
    """Read what `write_pickle` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        UntrustedPathError: another user could have written it.
    """
    return pickle.loads(read_private_file(str(path)))
