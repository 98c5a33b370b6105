"""Another user of this machine, who means no good. Needs root, which can be anybody."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

UID = 12345

# Modules are loaded first: another user may not be able to read this Python's.
_BECOME = f"""\
import errno, fcntl, importlib, json, os, socket, struct, sys, time
for name in sys.argv.pop(1).split(","):
    importlib.import_module(name or "os")
os.setgroups([])
os.setresgid({UID}, {UID}, {UID})
os.setresuid({UID}, {UID}, {UID})
exec(compile(sys.argv.pop(1), "<stranger>", "exec"))
"""


def needs_stranger() -> None:
    """Skip the test where there can be no other user."""
    if os.getuid() != 0:
        pytest.skip("only root can be another user")


def as_stranger(code: str, *args: object, load: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Run Python code as another user; `args` are its sys.argv[1:]. stdin and stdout are pipes.

    Args:
        code: the program.
        args: what it finds in sys.argv[1:].
        load: modules to import before it becomes the other user.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HPCRAY_")}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-c", _BECOME, ",".join(load), code, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd="/",
        env=environ,
    )


def stranger_says(code: str, *args: object, load: Sequence[str] = ()) -> str:
    """What such code prints, once it has ended well."""
    child = as_stranger(code, *args, load=load)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 0, out
    return out


def plant(how: str, planted: Path, name: Path) -> None:
    """Put a file where this user's would be, in a way that another user could have. Skips the test where that needs
    root and there is none.

    Args:
        how: "owner": it is the stranger's; "directory": what it lies in is; "mode": others can write to it; "link": it
            has a second name; "symbolic link": it is one; "pipe": it is no file.
    """
    if how in ("owner", "directory"):
        needs_stranger()
    if how == "link":
        os.link(planted, name)
    elif how == "symbolic link":
        name.symlink_to(planted)
    elif how == "pipe":
        os.mkfifo(name)
    else:
        os.rename(planted, name)
    if how in ("owner", "directory"):
        os.chown(name if how == "owner" else name.parent, UID, UID)
    elif how == "mode":
        name.chmod(0o666)
        name.parent.chmod(0o755)  # nobody could reach it in a closed directory
