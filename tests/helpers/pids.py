"""Processes of a test's job, by what they are."""

from __future__ import annotations

from pathlib import Path

from hpcray.platform.session_directory import live_sessions


def raylet_pid(node: int) -> int:
    """Pid of the raylet of a node of this test's job, which runs on this machine."""
    (pid,) = (info.pid for info in live_sessions() if info.node == node)
    return pid


def parent_of(pid: int) -> int:
    """The parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
