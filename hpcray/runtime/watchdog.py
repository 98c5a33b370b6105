"""A deadline for calls into libraries that cannot be interrupted: MPI_Init and MPI_Finalize."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from types import TracebackType


class Watchdog:
    """Ends this process when the `with` block does not end in time.

    Args:
        seconds: the time the block may take.
        text: goes to stderr when it took longer; "" for nothing.
        code: the exit code then.
    """

    def __init__(self, seconds: float, text: str, code: int) -> None:
        self._text = text
        self._code = code
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Watchdog:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            if self._text:
                print(self._text, file=sys.stderr, flush=True)
        os._exit(self._code)
