"""Nodes of one host: their processes speak to each other directly, as those of one node do.

What a raylet would do for a message between them is to pass it on, twice. A direct connection that ends is no proof of
a death; whoever sees one end asks on the way through the raylets (`Knock`), where it is known how a process ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

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
