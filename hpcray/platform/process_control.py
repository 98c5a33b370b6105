"""Processes that hpcray starts: their command lines, and attributes that a process sets for itself in the kernel: its
name, its end with its parent, which orphans it adopts.

Few modules are loaded for it: `hpcray.launch.local_ranks` starts with this one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder

LAUNCHER_NAME = "hpcray-ranks"
"""Name of the process that `hpcray-launch` starts the ranks of one host with."""
TEMPLATE_NAME = "hpcray-template"
"""Name of the fork server of a node, which tidies up after its raylet."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def set_process_name(name: str) -> None:
    """Set the name that `ps -o comm` shows for this process; the kernel keeps 15 bytes of it."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def become_subreaper() -> None:
    """Make this process, instead of init, the parent of descendants whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies.

    Args:
        parent: pid of the parent; if that process is gone already, the signal is sent at once.
        number: the signal.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def children() -> Iterator[tuple[int, str]]:
    """The children of this process, adopted ones too, with the names that `ps -o comm` shows."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
            for pid in map(int, file.read().split()):
                with (
                    contextlib.suppress(OSError),
                    open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as comm,
                ):
                    yield pid, comm.read().strip()


def _prctl(option: int, value: int | bytes) -> None:
    if _libc.prctl(option, value if isinstance(value, bytes) else ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


# ------------------------------------------------------------ python lines
# Command lines of Python that hpcray composes: they do not search the working directory for modules.
#
# `python -m MODULE` and `python -c CODE` put the working directory first on `sys.path`. In a directory that several
# users share, any of them could have left a `msgspec.py`, and it would run as the job's user, whose program lies
# elsewhere. A program of the user is started as the user says, with the `sys.path` that `python program.py` has.
#
# Python 3.11 has the option -P for this; it is not handed down to what the process starts, unlike PYTHONSAFEPATH.
# Before, and where hpcray is in the working directory and nowhere else, a line of code does the same before anything
# is imported.

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_HAS_OPTION = sys.version_info >= (3, 11)
_WITHOUT_DIRECTORY = "import sys; sys.path[0:1] = []; "
_RUN = "from runpy import run_module; run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def module_line(module: str, *words: str, python: str = "") -> list[str]:
    """`python -m MODULE WORD...`, which does not search the working directory.

    Args:
        module: its name. words: its arguments.
        python: the interpreter, of this Python's version; "" for this one.
    """
    if _HAS_OPTION and not _needs_root():
        return [python or sys.executable, "-P", "-m", module, *words]
    return [python or sys.executable, "-c", _prelude() + _RUN, module, *words]


def code_line(code: str, *words: str, python: str = "") -> list[str]:
    """`python -c CODE WORD...`, which does not search the working directory. Arguments: as for `module_line`."""
    return [python or sys.executable, "-c", _prelude() + code, *words]


def _needs_root() -> bool:
    """True if this process finds hpcray in a directory of its own only, as in a checkout that is not installed."""
    if _ROOT in sys.path[1:] or os.path.realpath(sys.path[0] or ".") != os.path.realpath(_ROOT):
        return False
    others = [finder for finder in sys.meta_path if finder is not PathFinder]  # of an editable installation
    return not any(finder.find_spec("hpcray", None) for finder in others)


def _prelude() -> str:
    return f"{_WITHOUT_DIRECTORY}sys.path.append({_ROOT!r}); " if _needs_root() else _WITHOUT_DIRECTORY
