"""A raylet's part in placement groups: bundles are prepared, committed, and given back, as the head says.

The head's messages to one node arrive in the order sent. So what comes after a ReturnBundles is about a later attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcray.base.ids import HEAD
from hpcray.base.resources import UNIT, add
from hpcray.core.effects import Effect, Send
from hpcray.core.scheduler.bundles import Bundle, BundleBook
from hpcray.core.scheduler.claims import ClaimBook
from hpcray.core.scheduler.devices import GPU
from hpcray.core.scheduler.ledger import Claim, Ledger
from hpcray.core.scheduler.queue import RESERVE_AFTER, WaitingRoom, Want, for_bundles
from hpcray.core.scheduler.wants import WantTable
from hpcray.wire import messages as m
from hpcray.wire.messages import Shape

if TYPE_CHECKING:
    from hpcray.base.resources import Resources


class BundleKeeper:
    """Changes the books of one raylet core as its head decides."""

    def __init__(self, ledger: Ledger, room: WaitingRoom, wants: WantTable, claims: ClaimBook) -> None:
        self._ledger = ledger
        self._book = BundleBook(ledger)
        self._room = room
        self._room.in_bundles = (self._book.shown, self._book.fits)
        self._wants = wants
        self._claims = claims
        self._queued: dict[bytes, Want] = {}

    def handlers(
        self,
        begin: Callable[[], bool],
        owe: Callable[[], None],
        refuse: Callable[[Effect], None],
        changed: Callable[[float, Want], None],
        unbind: Callable[[float, Want], None],
        sent_back: Callable[[float, Claim, str], None],
    ) -> dict[type, Callable[[float, bytes, Any], list[Effect]]]:
        """Message handlers for the core.

        Args:
            begin: called ahead of each message; whether anything new is started here at all.
            owe: the head should hear what is free now.
            refuse: sends an answer after that.
            changed: called with each want whose chances changed.
            unbind: sends what is bound to this node of a want back to the head.
            sent_back: likewise for a claim that was undone before it had a worker.
        """
        self._begin = begin
        self._owe = owe
        self._refuse = refuse
        self._changed = changed
        self._unbind = unbind
        self._sent_back = sent_back
        return {
            m.PrepareBundles: self._prepare,
            m.CommitBundles: self._commit,
            m.ReturnBundles: self._give_back,
        }

    def _prepare(self, now: float, src: bytes, msg: m.PrepareBundles) -> list[Effect]:
        """Hold all of the bundles or none; with patience, as soon as there is room."""
        begun = self._begin()
        self._forget(now, msg.group)
        if begun and self._hold(now, msg):
            return [Send(HEAD, m.BundlesPrepared(msg.group, msg.attempt, True))]
        if begun and msg.patience:
            self._queue(now, msg)
        else:
            self._refuse(self.give_up(msg))
        return []

    def _hold(self, now: float, msg: m.PrepareBundles, want: Want | None = None) -> bool:
        """Hold them if they fit. want: what queued for them; what is set aside for it is theirs."""
        held: list[Bundle] = []
        for index, amounts in msg.bundles.items():
            fits = self._room.fits(amounts, self._ledger.available, want)
            if not fits or self._book.has(msg.group.hex(), index):
                break
            held.append(self._book.hold(msg.group.hex(), index, amounts))
        ok = len(held) == len(msg.bundles)
        for bundle in () if ok else held:
            self._book.end(bundle)
        if ok and msg.commit:
            self._use(now, msg.group.hex())
        return ok

    def _queue(self, now: float, msg: m.PrepareBundles) -> None:
        """Wait for room like everybody else; the node may be kept free for it at once."""
        need: Resources = {}
        for amounts in msg.bundles.values():
            add(need, amounts)
        if need.get(GPU, 0) > UNIT:
            need[GPU] = -(-need[GPU] // UNIT) * UNIT  # parts of several devices: as many whole ones
        shape = Shape(tuple(sorted(need.items())), "", for_bundles(msg.group.hex()))
        want = self._queued[msg.group] = Want(HEAD, -1, shape, local=False, own=False, bound=1, attempt=msg)
        want.patience = now + msg.patience
        want.since, want.left = now - RESERVE_AFTER, now
        self._changed(now, want)

    def served(self, now: float, msg: m.PrepareBundles) -> Effect:
        """There is room for the bundles that queued: the answer."""
        want = self._queued.pop(msg.group, None)
        return Send(HEAD, m.BundlesPrepared(msg.group, msg.attempt, self._hold(now, msg, want)))

    def give_up(self, msg: m.PrepareBundles) -> Effect:
        """There was no room in time: the answer."""
        self._queued.pop(msg.group, None)
        return Send(HEAD, m.BundlesPrepared(msg.group, msg.attempt, False))

    def held(self) -> list[tuple[bytes, int, bool]]:
        """Group, index, and whether it may be used, of every bundle that is not on its way back; a new head asks."""
        self._book.tell_all()
        return [(bytes.fromhex(b.group), b.index, b.committed) for b in self._book if not b.leaving]

    def forget(self, now: float, group: bytes) -> None:
        """What queued for the group queues no more, and nobody waits for an answer."""
        self._forget(now, group)

    def _forget(self, now: float, group: bytes) -> None:
        """What queued for the group queues no more."""
        want = self._queued.pop(group, None)
        if want is not None:
            want.bound = 0
            self._changed(now, want)

    def _commit(self, now: float, src: bytes, msg: m.CommitBundles) -> list[Effect]:
        self._begin()
        self._use(now, msg.group.hex())
        return []

    def _use(self, now: float, group: str) -> None:
        """Let tasks and actors in."""
        for bundle in self._book.of(group):
            self._book.commit(bundle)
        for want in self._wants.in_group(group):
            self._changed(now, want)

    def _give_back(self, now: float, src: bytes, msg: m.ReturnBundles) -> list[Effect]:
        """End what runs in the bundles. They are the node's again when it is gone."""
        self._begin()
        self._owe()
        self._forget(now, msg.group)
        group = msg.group.hex()
        out: list[Effect] = []
        ended = [bundle for bundle in self._book.of(group) if bundle.index in msg.indices and not bundle.leaving]
        for bundle in ended:
            self._book.end(bundle)
            for claim in list(bundle.claims):
                if claim.worker:
                    self._claims.kill(claim, msg.reason, out)
                else:
                    self._claims.cancel(claim)
                    self._sent_back(now, claim, "")
        for want in self._wants.in_group(group):
            if want.bound and not self._room.fits(want.request, self._ledger.available, want):
                self._unbind(now, want)
            self._changed(now, want)
        if not self._book.of(group):
            self._wants.forget_group(group)
        return out
