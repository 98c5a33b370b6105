"""A head that takes over from another one: it knows what the journal says, and waits for what the nodes say.

Until every living node has told what it holds, nothing is decided: what comes meanwhile waits, in order. Then the
tables are compared with the nodes, the old head's death is dealt with, and all that waited follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hpcray.base.config import Config
from hpcray.base.ids import node_of, raylet_of
from hpcray.core.effects import Effect, Send
from hpcray.core.gcs.head import HANDLES as HEAD_HANDLES
from hpcray.core.gcs.head import HeadCore
from hpcray.core.gcs.journal import Replica
from hpcray.core.gcs.restoring import Members
from hpcray.wire import messages as m

HANDLES: tuple[type, ...] = (*HEAD_HANDLES, m.Held)
"""Message types for `SuccessorHead.handle`."""

_Later = tuple[Callable[..., list[Effect]], tuple[Any, Any]]


class SuccessorHead(HeadCore):
    """A head core that begins as another one's heir.

    Attributes:
        awaited: nodes that have not told yet what they hold.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.awaited: set[int] = set()
        self._held: dict[int, m.Held] = {}
        self._later: list[_Later] = []
        self._handlers[m.Held] = self._told

    def take_over(self, now: float, replica: Replica, old: int) -> Members:
        """Begin. `old`: the node of the head that has died; its death is still to be told, by `node_died`."""
        who = self.restore(now, replica)
        self.awaited = {info.index for info in who.infos if info.index not in who.dead} - {old}
        return who

    def handle(self, now: float, src: bytes, msg: m.Message) -> list[Effect]:
        """Any message in `HANDLES`."""
        if self.awaited and not isinstance(msg, m.Held):
            self._later.append((super().handle, (src, msg)))
            return []
        return super().handle(now, src, msg)

    def node_died(self, now: float, node: int, reason: str) -> list[Effect]:
        """A node is gone, with everything on it."""
        if not self.awaited:
            return super().node_died(now, node, reason)
        self._later.append((super().node_died, (node, reason)))
        self.awaited.discard(node)
        return self._begin(now)

    def process_died(self, now: float, proc: bytes, reason: str) -> list[Effect]:
        """Any process of the cluster is gone."""
        if not self.awaited:
            return super().process_died(now, proc, reason)
        self._later.append((super().process_died, (proc, reason)))
        return []

    def tick(self, now: float) -> list[Effect]:
        """Housekeeping, every `config.tick`."""
        return [] if self.awaited else super().tick(now)

    # ------------------------------------------------------------ inside

    def _told(self, now: float, src: bytes, msg: m.Held) -> list[Effect]:
        if msg.node not in self.awaited:
            return []
        self._held[msg.node] = msg
        self.awaited.discard(msg.node)
        return self._begin(now)

    def _begin(self, now: float) -> list[Effect]:
        """Go on as a head, once all have told."""
        if self.awaited:
            return []
        later, self._later = self._later, []
        messages = [(node_of(args[0]), args[1]) for _, args in later if isinstance(args[0], bytes)]
        for _, msg in messages:
            if isinstance(msg, m.NodeView):
                self._view.update(msg)
        gone = {(node, msg.actor): msg for node, msg in messages if isinstance(msg, m.ActorGone)}
        out = self._actors.reconcile(now, self._held, gone) + self._groups.reconcile(now, self._held)
        out += [Send(raylet_of(node), m.SetJob(self.job)) for node in sorted(self._held) if self.job is not None]
        for call, args in _latest(later):
            out += call(now, *args)
        out += self._actors.end_unknown()
        self._held = {}
        self._actors.retry(now, out)
        self._groups.retry(now, out, everything=True)
        return out


def _latest(later: list[_Later]) -> Iterable[_Later]:
    """All but reports of demand that others follow: they are absolute, and what was lacking once is no news."""
    last = {
        (args[1].holder, args[1].klass): place for place, (_, args) in enumerate(later) if isinstance(args[1], m.Unmet)
    }
    for place, (call, args) in enumerate(later):
        if not isinstance(args[1], m.Unmet) or last[args[1].holder, args[1].klass] == place:
            yield call, args
