"""Processes of neighbouring nodes that read in this node's store.

They open and release objects as the processes of this node do. How they end is their own raylet's word, as it is for
whoever else speaks with them; a connection that ends is no proof. Only where nobody can give it any more, since that
node is dead for the cluster, does a process read here until the kernel says that it does not.
"""

from __future__ import annotations

from hpcray.base.ids import node_of, number_of
from hpcray.runtime.local_links import Link
from hpcray.runtime.raylet import Raylet


class Guests:
    """Of one raylet.

    Args:
        arena_fd: what they map.

    Attributes:
        limit: how many may be connected. Who is not let in has its own node pull what is here.
    """

    def __init__(self, raylet: Raylet, arena_fd: int) -> None:
        self._raylet = raylet
        self._links = raylet.router.guests
        self._arena_fd = arena_fd
        self.limit = 0

    def hello(self, link: Link) -> None:
        """One has come."""
        raylet, proc = self._raylet, link.proc
        known = number_of(proc) and node_of(proc) in raylet.neighbours
        if not known or len(self._links) >= self.limit:
            raylet.loop.close_link(link)
            return
        try:
            raylet.router.welcome(link, raylet.welcome(proc), self._arena_fd)
        except OSError:
            raylet.loop.close_link(link)  # it has gone again, or learns so that it gets no answer
            return
        self._links[proc] = link

    def closed(self, link: Link) -> None:
        """Its connection has ended."""
        raylet, proc = self._raylet, link.proc
        if self._links.get(proc) is link:
            del self._links[proc]
            if node_of(proc) in raylet.buried:
                raylet.apply(raylet.store.process_died(raylet.loop.now, proc))
