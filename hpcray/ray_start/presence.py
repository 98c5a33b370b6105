"""Whether there can be a cluster of `ray start` at all: what each `init()` asks first, without another import.

Programs that have nothing to do with `ray start` pay for a look into two directories, and for no more.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Mapping

from hpcray.platform.config_files import configured_environment
from hpcray.platform.session_directory import ADDRESS, has_session_file

NODE_FILE = "ray_start.json"
"""What a started node has in its session directory."""
_DEFAULT = "~/.hpcray/clusters"


def start_directory(environ: Mapping[str, str]) -> str:
    """The path of the directory of secrets and calls."""
    path = configured_environment(environ).get("HPCRAY_START_DIR") or _DEFAULT
    if path.startswith("~/") and not environ.get("HOME"):
        with contextlib.suppress(KeyError):
            path = os.path.join(pwd.getpwuid(os.getuid()).pw_dir, path[2:])
    return os.path.abspath(os.path.expanduser(path))


def may_mean_started(address: str | None, environ: Mapping[str, str]) -> bool:
    """Return True if `find_session` has to decide what an address of `init()` means.

    Args:
        address: as the user gave it; None: what the environment says.
    """
    address = address or environ.get("RAY_ADDRESS") or ""
    if address == "local" or os.path.isabs(address):
        return False
    if address not in ("", "auto"):
        return True
    if environ.get(ADDRESS) and not environ.get("RAY_ADDRESS"):
        return False
    try:
        if os.listdir(start_directory(environ)):
            return True
    except FileNotFoundError:
        pass
    except OSError:
        return True
    return has_session_file(NODE_FILE, environ)
