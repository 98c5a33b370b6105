"""Helpers around the core API."""

from __future__ import annotations

from hpcray.api.named import list_named_actors
from hpcray.host.address import node_ip_address

__all__ = ["get_node_ip_address", "list_named_actors"]


def get_node_ip_address(address: str | None = None) -> str:
    """The IP address of this node, as other nodes see it.

    Args:
        address: "host:port" of a peer; the interface that leads there is chosen. No packet is sent.
    """
    return node_ip_address(address)
