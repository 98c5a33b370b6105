"""`ray._private.path_utils`: what is a path, and what a URI."""

from __future__ import annotations

import urllib.parse
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any


def is_path(path_or_uri: str) -> bool:
    """Return False for a URI; a Windows path with a drive is a path on Windows.

    Raises:
        TypeError: the argument is no text.
    """
    if not isinstance(path_or_uri, str):
        raise TypeError(f" path_or_uri must be a string, got {type(path_or_uri)}.")
    scheme = urllib.parse.urlparse(path_or_uri).scheme
    path: Any = Path(path_or_uri)
    if isinstance(path, PurePosixPath):
        return not scheme
    assert isinstance(path, PureWindowsPath)
    return scheme == path.drive.strip(":").lower()
