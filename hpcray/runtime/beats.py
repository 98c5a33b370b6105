"""A raylet's heartbeat: it says that its node lives, and looks who does not, from the thread that moves its frames."""

from __future__ import annotations

from collections.abc import Callable

from hpcray.core.gcs.membership import HeadWatch, Membership
from hpcray.runtime.raylet import Raylet


class Beats:
    """Every `heartbeat_interval`, once begun.

    Args:
        membership: node 0's book of nodes; None elsewhere.
        watch: the other nodes' eye on the head; None on node 0.
        on_look: called each time on the other nodes: why the head counts as dead, "" while it lives; and whether nobody
            else is heard of either.
    """

    def __init__(
        self,
        raylet: Raylet,
        membership: Membership | None,
        watch: HeadWatch | None,
        on_look: Callable[[str, bool], None],
    ) -> None:
        self._raylet = raylet
        self._membership = membership
        self._watch = watch
        self._on_look = on_look

    def beat(self) -> None:
        """Now, and from now on."""
        raylet, loop = self._raylet, self._raylet.loop
        now, heard = loop.now, loop.heard
        loop.call_at(now + raylet.seat.config.heartbeat_interval, self.beat)
        if self._membership is not None:
            for node, when in heard.items():
                self._membership.heard(when, node)
            raylet.apply(self._membership.tick(now))
        elif self._watch is not None:
            self._watch.heard(heard.get(0, 0.0))
            self._watch.heard_other(max((when for node, when in heard.items() if node), default=0.0))
            effects, dead = self._watch.tick(now)
            raylet.apply(effects)
            self._on_look(dead, self._watch.alone)
