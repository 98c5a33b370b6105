"""`ray._private.services`."""

from __future__ import annotations

from hpcray.host.address import node_ip_address

__all__ = ["get_node_ip_address"]


def get_node_ip_address(address: str | None = None) -> str:
    """The IP address of this node, as other nodes see it."""
    return node_ip_address(address)
