"""The session directory of the node that an address means, for `init()` and commands."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping

from hpcray.common.exceptions import StartupError
from hpcray.platform.config_files import launch_config
from hpcray.platform.session_directory import ADDRESS, OWN_SESSION
from hpcray.ray_start.clusters import Asker, clusters_named
from hpcray.ray_start.order import (
    Asked,
    Join,
    NoStartedCluster,
    Refuse,
    Seen,
    next_step,
    unexpected_ends,
)
from hpcray.ray_start.presence import is_being_called
from hpcray.ray_start.registry import Registry, machine_id, nodes_here
from hpcray.ray_start.surroundings import own_allocation, own_names, resolve
from hpcray.runtime.node.join_token import query_head

logger = logging.getLogger("hpcray")

_PAUSE = 0.2
_UNDER_WAY = 15.0
"""Seconds in which a command that a script of this allocation is about to run has to say that it runs."""
_OUTSIDE_WAIT = 3.0
"""Seconds that a named cluster is waited for outside of any allocation."""

_ANSWER = 5.0
"""Seconds in which the head has to say which nodes have ended."""
_LOST_SHOWN = 4

ATTACHED_SCHEMES = frozenset(("slurm", "ssh"))
"""Schemes of addresses of jobs that run elsewhere (`hpcray.attach`)."""


def find_session(address: str | None, environ: Mapping[str, str], wait: bool = True) -> str | None:
    """The session directory of the node of a started cluster that an address means.

    Args:
        address: of `init()` or a command, as the user gave it; None: what the environment says.
        wait: whether to wait for a node that is on its way.

    Returns:
        None where no started cluster is meant, and the rules for other jobs decide.

    Raises:
        ConnectionError: a started cluster is meant, and it is not here, or it is not clear which.
    """
    if address and "://" in address and address.partition("://")[0] in ATTACHED_SCHEMES:
        from hpcray.attach.client import attach  # few programs attach

        return attach(address, environ)
    asked = _asked(address, environ)
    deadline = called_by = 0.0
    while True:
        seen = look(asked, environ)
        step = next_step(asked, seen)
        if isinstance(step, Join):
            lost, why = unexpected_ends(_deaths(step.session_dir) if wait else ())
            if lost:
                logger.warning(
                    "hpcray: nodes of this cluster have ended, and no command has stopped them: %s%s",
                    ", ".join(lost[:_LOST_SHOWN]) + " …" * (len(lost) > _LOST_SHOWN),
                    why,
                )
            return step.session_dir
        now = time.monotonic()
        if isinstance(step, NoStartedCluster):
            called_by = called_by or now + _UNDER_WAY
            if not asked.is_open or not wait or now >= called_by or not is_being_called(environ):
                return None
            time.sleep(_PAUSE)
            continue
        if not deadline:
            limit = launch_config(environ).join_wait
            deadline = now + (limit if seen.asker.allocation or seen.calls else min(limit, _OUTSIDE_WAIT))
        if isinstance(step, Refuse) or not wait or now >= deadline:
            raise ConnectionError(f"Failed to connect to Ray at address: {asked.address or 'auto'}. {step.reason}")
        time.sleep(_PAUSE)


def _deaths(session_dir: str) -> list[str]:
    """Hosts of nodes that have ended, and why."""
    try:
        rows = query_head(session_dir, "nodes", _ANSWER)
    except StartupError:
        return []
    return [row["DeathReason"] for row in rows if not row["Alive"]]


def look(asked: Asked, environ: Mapping[str, str]) -> Seen:
    """See what there is of started clusters."""
    nodes = nodes_here(environ)
    allocation = own_allocation(environ)
    registry = Registry(environ)
    name = asked.name
    calls = registry.refused(allocation)
    try:
        calls = [*registry.calls(allocation), *calls]
        known = [found.cluster for found in registry.clusters()] if name is not None else []
    except StartupError:
        if name is not None:
            raise
        known = []  # a program that asks for no started cluster need not mend the directory
    names: frozenset[str] = frozenset()
    resolved: frozenset[str] = frozenset()
    if name is not None:
        names = frozenset(text.lower() for text in own_names())
        resolved = frozenset(resolve(name.host)) if not name.is_local else resolved
    return Seen(
        asker=Asker(allocation, names, resolved),
        nodes=nodes,
        known=known,
        calls=calls,
        gone=frozenset(call.ident for call in calls if call.is_gone()),
        where=registry.path,
        machine=machine_id(),
    )


def session_here(address: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The session directory of the node here of the started cluster that an address means; None where there is none.
    For commands, which do not wait.

    Raises:
        SeveralClustersError: more than one could be meant.
    """
    environ = os.environ if environ is None else environ
    asked = _asked(address, environ)
    step = next_step(asked, look(asked, environ))
    return step.session_dir if isinstance(step, Join) else None


def is_started(session_dir: str, environ: Mapping[str, str] | None = None) -> bool:
    """Return True if a node of this host is of a started cluster, so that only its own name means it."""
    nodes = nodes_here(os.environ if environ is None else environ)
    return any(node.session_dir == session_dir for node in nodes)


def hidden_node(address: str, environ: Mapping[str, str] | None = None) -> str:
    """The ident of the command that holds a node on this host of the started cluster that an address means, where that
    node's files are not to be seen from here, as from another container; "" for none."""
    environ = os.environ if environ is None else environ
    asked = _asked(address, environ)
    seen = look(asked, environ)
    hidden = [
        call
        for call in seen.calls
        if call.session_dir and call.host == socket.gethostname() and call.ident not in seen.gone
        if not os.path.exists(call.session_dir)
    ]
    if asked.name is not None:
        meant = [cluster.ident for cluster in clusters_named(asked.name, seen.known, seen.asker)]
        hidden = [call for call in hidden if call.cluster in meant]
    return hidden[0].ident if hidden and len({call.cluster for call in hidden}) == 1 else ""


def head_elsewhere(address: str, environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """The Slurm job and the host of the head of the started cluster that an address means; "" for what is not known.
    For commands that have found no node of it here."""
    environ = os.environ if environ is None else environ
    asked = _asked(address, environ)
    name = asked.name
    if name is None:
        return "", ""
    seen = look(asked, environ)
    found = clusters_named(name, seen.known, seen.asker)
    if not found:
        return "", ""
    kind, _, job = found[0].allocation.partition("-")
    return (job if kind == "slurm" else ""), found[0].host


def _asked(address: str | None, environ: Mapping[str, str]) -> Asked:
    return Asked(
        address=address or environ.get("RAY_ADDRESS") or "",
        ray_address=environ.get("RAY_ADDRESS") or "",
        hpcray_address=environ.get(ADDRESS) or "",
        session=environ.get(OWN_SESSION) or "",
    )
