"""Names of `ray.util` that hpcray itself has no use for."""

from __future__ import annotations

from hpcray.compat.names import rpdb as pdb

__all__ = ["get_node_instance_id", "pdb"]


def get_node_instance_id() -> str:
    """Return "": the id of this node at a cloud provider."""
    return ""
