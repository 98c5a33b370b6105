"""The stacks of a process that cannot answer, because C code of the user's holds Python's lock.

A signal handler written in C (`faulthandler`) writes them into memory of the process that has a name; whoever asks
sends the signal, and reads that memory through /proc. Nothing of it is a file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
from collections.abc import Iterable

from hpcray.host.processes import catches

SIGNAL = signal.SIGRTMAX - 4
_NAME = "hpcray-stacks"
_MOST = 1 << 16


class _Here:
    """The descriptor of this process's memory; -1: none."""

    fd = -1


def stay_visible() -> None:
    """From now on this process can be asked by `ask`, until `hide`. A process that it forks has to call it itself."""
    hide()
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        _Here.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        fcntl.fcntl(_Here.fd, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(SIGNAL, _Here.fd, all_threads=True)


def hide() -> None:
    """As it was before."""
    if _Here.fd >= 0:
        faulthandler.unregister(SIGNAL)
        with contextlib.suppress(OSError):
            os.close(_Here.fd)
        _Here.fd = -1


def ask(pids: Iterable[int]) -> dict[int, str]:
    """Have processes write their stacks; where each does, for `answer` a moment later. Who cannot is left out."""
    asked: dict[int, str] = {}
    for pid in pids:
        memory = _memory_of(pid)
        if memory and catches(pid, SIGNAL):
            with contextlib.suppress(OSError):
                os.truncate(memory, 0)
                os.kill(pid, SIGNAL)
                asked[pid] = memory
    return asked


def answer(memory: str) -> str:
    """What a process has written since it was asked; the innermost frames are first."""
    try:
        with open(memory, "rb") as file:
            return file.read(_MOST).decode("utf-8", "replace")
    except OSError:
        return ""


def _memory_of(pid: int) -> str:
    directory = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(directory):
            if os.readlink(f"{directory}/{name}").startswith(f"/memfd:{_NAME} "):
                return f"{directory}/{name}"
    except OSError:
        pass  # it is gone
    return ""
