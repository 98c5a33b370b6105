"""One line at the bottom of a terminal, above which all other output scrolls, of whatever process."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpcray.common.terminal_text import plain

TERMINAL_SIZE = "HPCRAY_TERMINAL"
"""Variable of what writes to a terminal through a launcher: its columns and rows, as `120x40`."""
_FEWEST_ROWS = 3
_SAVE, _RESTORE = "\x1b7", "\x1b8"


def terminal_size(fd: int, environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return columns and rows of the terminal that a descriptor leads to; None where it leads to none, or a dumb one.

    Args:
        environ: says what terminal a launcher forwards to, and of what kind it is.
    """
    if environ.get("TERM", "") in ("", "dumb"):
        return None
    try:
        return tuple(os.get_terminal_size(fd))  # type: ignore[return-value]
    except OSError:
        columns, _, rows = environ.get(TERMINAL_SIZE, "").partition("x")
        return (int(columns), int(rows)) if columns.isdecimal() and rows.isdecimal() else None


class StatusLine:
    """The last row of a terminal. What others print scrolls in the rows above it (the terminal's scroll region).

    Args:
        fd: where to write.
        environ: see `terminal_size`.
    """

    def __init__(self, fd: int, environ: Mapping[str, str]) -> None:
        self._fd, self._environ = fd, environ
        self._size: tuple[int, int] | None = None

    @property
    def columns(self) -> int:
        """The width of the terminal."""
        size = terminal_size(self._fd, self._environ)
        return size[0] if size is not None else 0

    def show(self, text: str) -> None:
        """Show a line, cut to the width of the terminal.

        Raises:
            OSError: the terminal is gone.
        """
        size = terminal_size(self._fd, self._environ)
        if size is None or size[1] < _FEWEST_ROWS:
            return
        columns, rows = size
        out = ""
        if size != self._size:
            self._size = size
            # "Index" makes room where the cursor is in the last row; setting the region moves the cursor.
            out = f"\x1bD{_SAVE}\x1b[1;{rows - 1}r{_RESTORE}\x1b[1A"
        out += f"{_SAVE}\x1b[{rows};1H\x1b[2K\x1b[7m{plain(text)[: columns - 1]}\x1b[0m{_RESTORE}"
        os.write(self._fd, out.encode())

    def close(self) -> None:
        """Give the row back.

        Raises:
            OSError: the terminal is gone.
        """
        if self._size is not None:
            rows, self._size = self._size[1], None
            os.write(self._fd, f"{_SAVE}\x1b[r\x1b[{rows};1H\x1b[2K{_RESTORE}".encode())
