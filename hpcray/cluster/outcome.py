"""How a submitted job ended, and the files through which its processes tell each other. All of them lie in the job's
own 0700 folder; nothing is read from anywhere else.

    call.pkl         the function and its arguments, for the driver
    driver.json      the driver's pid and host, and whether its function can write a checkpoint
    outcome.pkl      what the driver made of it
    checkpoint.pkl   what to call when the job starts again
    cancelled        somebody cancelled the job
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CALL, DRIVER, OUTCOME, CHECKPOINT, CANCELLED = (
    "call.pkl",
    "driver.json",
    "outcome.pkl",
    "checkpoint.pkl",
    "cancelled",
)
VALUE, ERROR, EXIT, LOST = "value", "error", "exit", "lost"


@dataclass(frozen=True)
class Call:
    """A function with its arguments, pickled; `paths` is where its modules are found."""

    name: str
    paths: tuple[str, ...]
    blob: bytes

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Pickle a call; functions and classes of the calling script travel with it."""
        import sys

        import cloudpickle

        name = getattr(function, "__name__", type(function).__name__)
        paths = tuple(os.path.abspath(path) if path else os.getcwd() for path in sys.path)
        return cls(name, tuple(dict.fromkeys(paths)), cloudpickle.dumps((function, args, kwargs)))

    def load(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The function and its arguments, after `paths` were made known to the interpreter."""
        import sys

        sys.path += [path for path in self.paths if path not in sys.path]
        function, args, kwargs = pickle.loads(self.blob)
        return function, args, kwargs


@dataclass(frozen=True)
class Outcome:
    """The end of a job.

    Attributes:
        kind: "value" (of a function), "error" (it raised), "exit" (of a script), "lost" (it ended without a word).
        code: exit code of the launch; 128 + n for signal n.
        blob: the pickled value, or the pickled `RayTaskError`.
        ended_by: "SIGTERM" where the job was told to end, "time" where its time was up, else "".
    """

    kind: str
    code: int = 0
    blob: bytes = b""
    ended_by: str = ""

    @property
    def ok(self) -> bool:
        """Whether the job did what it was to do."""
        return self.kind == VALUE or (self.kind == EXIT and self.code == 0)


def write_pickle(path: Path, value: Any) -> None:
    """Write a file that readers see whole or not at all, for this user's eyes only."""
    import cloudpickle

    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        cloudpickle.dump(value, file)
    os.replace(temporary, path)


def read_pickle(path: Path) -> Any:
    """What `write_pickle` wrote.

    Raises:
        FileNotFoundError: it has not.
    """
    with open(path, "rb") as file:
        return pickle.load(file)
