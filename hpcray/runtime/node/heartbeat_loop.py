"""The periodic heartbeats of a raylet, and its look at those of others."""

from __future__ import annotations

from collections.abc import Callable

from hpcray.common.ids import HEAD, raylet_of
from hpcray.core.effects import Send
from hpcray.core.gcs.node_manager import HeadFailureDetector, NodeManager, PeerProbe
from hpcray.protocol import messages as m
from hpcray.runtime.raylet.raylet import Raylet

_SLACK = 0.1
"""The share of its period by which a heartbeat to the head may be late, to share a wake-up."""


class HeartbeatLoop:
    """Sends heartbeats and checks those of other nodes, every `heartbeat_interval`, in the raylet's thread.

    Args:
        node_manager: on the head; None elsewhere.
        head_failure_detector: on all other nodes.
        on_check: called each time on the other nodes: with the reason why the head is dead, "" while it lives; and
            whether no other node is heard of either.
    """

    def __init__(
        self,
        raylet: Raylet,
        node_manager: NodeManager | None,
        head_failure_detector: HeadFailureDetector | None,
        on_check: Callable[[str, bool], None],
    ) -> None:
        self._raylet = raylet
        self._node_manager = node_manager
        self._head_failure_detector = head_failure_detector
        self._on_check = on_check
        config = raylet.context.config
        self._peer_probe = PeerProbe(config.heartbeat_interval, config.node_timeout)

    def lead(self, node_manager: NodeManager) -> None:
        """This node has become the head."""
        self._node_manager, self._head_failure_detector = node_manager, None

    def head_moved(self, now: float, head: int) -> None:
        """Another node has become the head."""
        if self._head_failure_detector is not None:
            self._head_failure_detector.head_moved(now, head)

    def beat(self) -> None:
        """Send a heartbeat and schedule the next."""
        raylet, loop = self._raylet, self._raylet.loop
        now, last_heard = loop.now, loop.last_heard
        interval = raylet.context.config.heartbeat_interval
        if self._node_manager is not None:
            loop.call_at(now + interval, self.beat)
            for node, when in last_heard.items():
                self._node_manager.heard(when, node)
            raylet.apply(self._node_manager.tick(now))
        elif (detector := self._head_failure_detector) is not None:
            # The head's own heartbeat wakes this raylet at about this time.
            loop.call_at(now + interval, self.beat, _SLACK * interval)
            head = raylet.head_location.node
            detector.heard(last_heard.get(head, 0.0))
            detector.heard_other(max((when for node, when in last_heard.items() if node != head), default=0.0))
            effects, dead = detector.tick(now)
            for effect in effects:
                if isinstance(effect, Send) and isinstance(effect.msg, m.Heartbeat):
                    raylet.router.send_heartbeat(effect.msg)  # the head looks at the clock as often as this raylet
                else:
                    raylet.apply((effect,))
            self._probe_peers(head)
            self._on_check(dead, detector.alone)

    def _probe_peers(self, head: int) -> None:
        """Ping nodes that do not reply, and accuse those that do not reply to the Ping either."""
        raylet, router = self._raylet, self._raylet.router
        contacted, router.contacted = router.contacted, set()
        contacted.discard(head)
        silent, accused = self._peer_probe.tick(raylet.loop.now, contacted, raylet.loop.last_heard, router.lost_nodes)
        for node in silent:
            router.send(raylet_of(node), m.Ping(raylet.node))
        for node, seconds in accused:
            router.send(HEAD, m.PeerFailed(node, f"it has not answered for {seconds:.1f} s"))
