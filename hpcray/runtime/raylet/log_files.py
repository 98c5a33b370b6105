"""The log files of this node, for questions of `hpcray.util.state`. A raylet reads a piece at a time."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Any

from hpcray.common.log_names import LOG_PIECE


class LogFiles:
    """The files in one directory.

    Args:
        directory: with the log files.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def find(self, pattern: str = "*") -> dict[str, Any]:
        """Return the "names" of the files that match a pattern, directories with a slash; or a "problem"."""
        path = PurePosixPath(pattern)
        if path.anchor or ".." in path.parts:
            text = f"Invalid glob filter: {pattern}. It must be a relative path and cannot contain '..'."
            return {"problem": text}
        try:
            found = [
                one.relative_to(self._directory).as_posix() + ("/" if one.is_dir() else "")
                for one in self._directory.glob(pattern)
            ]
        except (OSError, ValueError, NotImplementedError) as error:
            return {"problem": f"Invalid glob filter: {pattern}. {error}"}
        return {"names": sorted(found)}

    def read(self, name: str, start: int, size: int) -> dict[str, Any]:
        """Return the "data" of a file from offset `start` on, at most `size` bytes, and its "size"; or a "problem"."""
        path = os.path.abspath(self._directory / name)
        if not os.path.isfile(path):
            return {"problem": f"A file is not found at: {path}"}
        if not Path(path).is_relative_to(self._directory):
            return {"problem": f"{path} not in {self._directory}"}
        try:
            with open(path, "rb", buffering=0) as file:
                file.seek(start)
                return {"data": file.read(min(size, LOG_PIECE)), "size": os.fstat(file.fileno()).st_size}
        except OSError as error:
            return {"problem": f"{path} cannot be read: {error}"}
