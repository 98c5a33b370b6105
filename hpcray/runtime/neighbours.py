"""Nodes of one host: their processes speak to each other directly, as those of one node do.

What a raylet would do for a message between them is to pass it on, twice. A direct connection that ends is no proof of
a death; whoever sees one end asks on the way through the raylets (`Knock`), where it is known how a process ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from hpcray.transport.base import DataPlane, TransportError
from hpcray.wire.messages import NodeInfo


def neighbours(me: NodeInfo, nodes: Iterable[NodeInfo]) -> dict[int, str]:
    """The session directories of the other nodes of this host, by node, as far as they can be seen from here.

    Two containers may have one host name and not one `/tmp`. Where they have, but are on two machines, nobody answers
    at the sockets in it, and messages go through the raylets.
    """
    if not me.session_dir:
        return {}
    return {
        info.index: info.session_dir
        for info in nodes
        if info.index != me.index and info.host == me.host and os.path.isdir(info.session_dir or "")
    }


def connect(data: DataPlane | None, me: NodeInfo, nodes: Sequence[NodeInfo]) -> dict[int, str]:
    """Make all other nodes reachable for objects; `neighbours` is what it returns.

    Raises:
        TransportError: no way to one of them; the message names it.
    """
    if data is not None:
        for info in nodes:
            if info.index != me.index:
                try:
                    data.connect(info.index, info.data_address, info.host == me.host)
                except TransportError as error:
                    raise TransportError(f"no connection to node {info.index} on {info.host}: {error}") from None
    return neighbours(me, nodes)
