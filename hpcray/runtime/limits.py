"""A node that comes near the limits of its raylet process: it starts fewer workers, or says why it cannot start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcray.base.failures import StartupError
from hpcray.host.limits import connections_left, raise_open_files
from hpcray.runtime.local_links import Listener

if TYPE_CHECKING:
    from hpcray.runtime.raylet import Raylet

_LEAST = 2
_SAY_EVERY = 10.0


def need_open_files() -> None:
    """Raise this raylet's limit of open files as far as it goes. Call it when the wires are open.

    Raises:
        StartupError: not even a driver and a worker could connect.
    """
    files = raise_open_files()
    if connections_left(files) < _LEAST:
        raise StartupError(
            f"this node's raylet may have {files} open files, too few for a driver and a worker (RLIMIT_NOFILE); "
            "hint: ulimit -n 4096"
        )


def keep_within_limits(raylet: Raylet, listener: Listener) -> None:
    """Let the node have no more workers than its raylet has descriptors for, guests on what they leave, and tell when
    somebody is turned away."""
    files = raise_open_files()
    room = connections_left(files)
    pool = raylet.core.pool
    # Other nodes may turn out to be neighbours, whose processes want to read here.
    most = room - 1 if raylet.seat.cluster_size == 1 else (room - 1) * 3 // 4
    if most < pool.limit:
        pool.limit = max(1, most)
        pool.limited_by = f", as its raylet may have {files} open files; hint: raise ulimit -n"
    raylet.guests.limit = max(0, room - 1 - pool.limit)
    said = -_SAY_EVERY

    def full() -> None:
        nonlocal said
        if raylet.loop.now - said >= _SAY_EVERY:
            said = raylet.loop.now
            raylet.say(f"a process was turned away: no descriptor is left of {files}; hint: raise ulimit -n")

    listener.on_full = full
