"""Which ports processes listen on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path


def listening(pids: Iterable[int]) -> list[str]:
    """The internet sockets that these processes hold and that anybody could reach, as lines of /proc/net."""
    inodes = {
        found[1]
        for pid in pids
        for fd in os.listdir(f"/proc/{pid}/fd")
        if (found := re.match(r"socket:\[(\d+)\]", _target(f"/proc/{pid}/fd/{fd}")))
    }
    lines = []
    for table in ("tcp", "tcp6", "udp", "udp6", "raw"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (fields[3] == "0A" or not table.startswith("tcp")):
                lines.append(f"{table} {line}")
    return lines


def port_of(line: str) -> int:
    """The port of such a line."""
    return int(line.split()[2].rpartition(":")[2], 16)


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
