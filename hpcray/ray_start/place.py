"""The directory with the secrets of this user's started clusters: which one it is, and how it is opened."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Mapping

from hpcray.common.exceptions import StartupError
from hpcray.platform.config_files import launch_config
from hpcray.platform.private_files import CLOSED, PrivateDirectory

_DEFAULT = "~/.hpcray/clusters"
_HINT = "hint: HPCRAY_START_DIR names another directory, of yours alone, that all nodes see"


def start_directory(environ: Mapping[str, str]) -> str:
    """The path of the directory."""
    path = launch_config(environ).start_dir or _DEFAULT
    if path.startswith("~/") and not environ.get("HOME"):
        with contextlib.suppress(KeyError):
            path = os.path.join(pwd.getpwuid(os.getuid()).pw_dir, path[2:])
    return os.path.abspath(os.path.expanduser(path))


def open_start_directory(path: str, make: bool) -> PrivateDirectory:
    """Open the directory: only this user can enter it, and no other can exchange one above.

    Raises:
        StartupError: it cannot be used; the message says why.
    """
    try:
        return PrivateDirectory.open(path, make, CLOSED, ancestors=True)
    except OSError as error:
        raise StartupError(f"{path} cannot keep the secrets of clusters: {error}; {_HINT}") from None
