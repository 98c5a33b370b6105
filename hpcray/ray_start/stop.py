"""`ray stop`: the end of this user's started nodes on this host, of one allocation."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence

from hpcray.common.exceptions import StartupError
from hpcray.platform.private_files import write_private_file
from hpcray.platform.process_tree import ProcessIdentity
from hpcray.platform.session_directory import read_session, remove_dead_sessions
from hpcray.ray_start.clusters import StartedNode, nodes_to_stop
from hpcray.ray_start.keeper import AT_ONCE, STOPPED
from hpcray.ray_start.registry import Registry, nodes_here
from hpcray.ray_start.session_files import sweep_files
from hpcray.ray_start.surroundings import own_allocation

GRACE = 16.0
"""Seconds that nodes have to end, as in Ray."""
_FORCED = 8.0
_LAST_PROCESSES = 5.0
"""Seconds that the last processes of a node have, whose keeper was killed, before its files stay."""
_CHECK = 0.02


class SeveralAllocationsError(Exception):
    """Nodes of several allocations run here, and nothing says which are meant."""

    def __init__(self, allocations: Sequence[str]) -> None:
        super().__init__(
            f"this user has nodes of several allocations on this host ({', '.join(allocations)}), and this shell is in "
            "none that is known; hint: SLURM_JOB_ID=<job> ray stop, or srun --jobid=<job> --overlap ray stop"
        )


def stop_nodes(environ: Mapping[str, str], force: bool, grace: float = GRACE) -> int:
    """End this user's started nodes of this allocation on this host, and wait until they have ended.

    Args:
        environ: of the shell.
        force: without waiting for their tasks.
        grace: seconds that they have; then they are killed.

    Returns:
        The number of nodes that were ended.

    Raises:
        SeveralAllocationsError: it cannot be known which are meant. None was ended.
    """
    nodes, several = nodes_to_stop(nodes_here(environ), own_allocation(environ))
    if several:
        raise SeveralAllocationsError(several)
    # The head comes last: it ends those that are left.
    left = [node for node in sorted(nodes, key=lambda node: node.head) if _runs(node)]
    alone = [node for node in left if not _is_held(node)]
    for node in left:
        with contextlib.suppress(OSError):
            write_private_file(os.path.join(node.session_dir, STOPPED), b"")
        _signal(node, AT_ONCE if force else signal.SIGTERM)
    _await(left, _FORCED if force else grace)
    for number in (AT_ONCE, signal.SIGKILL):
        left = [node for node in left if _runs(node)]
        for node in left:
            _signal(node, number)
        _await(left, _FORCED)
    remove_dead_sessions(environ)
    Registry(environ).sweep(own_allocation(environ), reasons=False)
    deadline = time.monotonic() + _LAST_PROCESSES
    while sweep_files(environ) and (alone or not nodes_here(environ)) and time.monotonic() < deadline:
        time.sleep(_CHECK)
    return len(nodes)


def _await(nodes: Sequence[StartedNode], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(map(_runs, nodes)) and time.monotonic() < deadline:
        time.sleep(_CHECK)


def _is_held(node: StartedNode) -> bool:
    """True if its keeper runs, and not another process that has got its pid."""
    found = ProcessIdentity.of(node.keeper)
    return found is not None and found.started == node.started


def _raylet(node: StartedNode) -> int:
    """The pid of its raylet, which ends by itself when its keeper was killed; 0 when it has ended."""
    try:
        return read_session(node.session_dir).pid
    except StartupError:
        return 0


def _runs(node: StartedNode) -> bool:
    return _is_held(node) or bool(_raylet(node))


def _signal(node: StartedNode, number: int) -> None:
    """Send a signal to the keeper; to the raylet where the keeper is gone, or is killed."""
    with contextlib.suppress(OSError):  # it has ended, and another process, perhaps another user's, may have its pid
        if _is_held(node):
            os.kill(node.keeper, number)
        elif number != AT_ONCE and (pid := _raylet(node)):
            os.kill(pid, number)
