"""A raylet's heartbeat: it says that its node lives, and looks who does not, from the thread that moves its frames."""

from __future__ import annotations

from collections.abc import Callable

from hpcray.base.ids import HEAD, raylet_of
from hpcray.core.gcs.membership import HeadWatch, Membership
from hpcray.core.gcs.silence import Unanswered
from hpcray.runtime.raylet import Raylet
from hpcray.wire import messages as m


class Beats:
    """Every `heartbeat_interval`, once begun.

    Args:
        membership: the head's book of nodes; None elsewhere.
        watch: the other nodes' eye on the head; None on the head.
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
        config = raylet.seat.config
        self._unanswered = Unanswered(config.heartbeat_interval, config.node_timeout)

    def lead(self, membership: Membership) -> None:
        """This node is the head from now on."""
        self._membership, self._watch = membership, None

    def moved(self, now: float, head: int) -> None:
        """Another node is the head from now on."""
        if self._watch is not None:
            self._watch.moved(now, head)

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
            head = raylet.headship.node
            self._watch.heard(heard.get(head, 0.0))
            self._watch.heard_other(max((when for node, when in heard.items() if node != head), default=0.0))
            effects, dead = self._watch.tick(now)
            raylet.apply(effects)
            self._look_at_peers(head)
            self._on_look(dead, self._watch.alone)

    def _look_at_peers(self, head: int) -> None:
        """Who does not answer is asked whether it lives, and accused if it does not answer that either."""
        raylet, router = self._raylet, self._raylet.router
        spoken, router.spoken = router.spoken, set()
        spoken.discard(head)
        silent, accused = self._unanswered.tick(raylet.loop.now, spoken, raylet.loop.heard, router.lost_nodes)
        for node in silent:
            router.send(raylet_of(node), m.Ping(raylet.node))
        for node, seconds in accused:
            router.send(HEAD, m.PeerFailed(node, f"it has not answered for {seconds:.1f} s"))
