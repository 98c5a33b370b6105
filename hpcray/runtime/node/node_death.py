"""Reports a node that has been declared dead to all parts of this raylet."""

from __future__ import annotations

from hpcray.protocol import messages as m
from hpcray.runtime.raylet.raylet import Raylet
from hpcray.transport.base import ControlTransport, DataPlane


def forget_node(raylet: Raylet, control: ControlTransport | None, data: DataPlane | None, died: m.NodeDied) -> None:
    """Report a dead node to the cores, transports and processes of this node; once, as a new head repeats it."""
    node, reason, now = died.node, died.reason, raylet.loop.now
    if node in raylet.forgotten_nodes:
        return
    raylet.forgotten_nodes.add(node)
    raylet.neighbor_dirs.pop(node, None)
    raylet.loop.last_heard.pop(node, None)
    raylet.router.lose_node(node, reason, died.kept_at)
    for extension in raylet.events.extensions:
        extension.node_died(node, reason)
    if raylet.head is not None:
        raylet.apply(raylet.head.node_died(now, node, reason))
    raylet.apply(raylet.lease_manager.node_died(now, node))
    # Cancels receives, so before the transports forget the node.
    raylet.apply(raylet.store.node_died(now, node, raylet.router.neighbor_links))
    raylet.introspection.figures.node_died(now, node)
    if control is not None:
        control.forget(node, reason)
    if data is not None:
        data.forget(node, reason)
    for proc in raylet.router.links:
        raylet.router.send(proc, died)
