"""A raylet's part in placement groups: bundles are prepared, committed, and given back, as the head says.

The head's messages to one node arrive in the order sent. So what comes after a ReturnBundles is about a later attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcray.base.ids import HEAD
from hpcray.core.effects import Effect, Send
from hpcray.core.scheduler.bundles import Bundle, BundleBook
from hpcray.core.scheduler.claims import ClaimBook
from hpcray.core.scheduler.ledger import Claim, Ledger
from hpcray.core.scheduler.queue import WaitingRoom, Want
from hpcray.core.scheduler.wants import WantTable
from hpcray.wire import messages as m

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

    def handlers(
        self,
        begin: Callable[[], bool],
        changed: Callable[[float, Want], None],
        unbind: Callable[[float, Want], None],
        sent_back: Callable[[float, Claim, str], None],
    ) -> dict[type, Callable[[float, bytes, Any], list[Effect]]]:
        """Message handlers for the core.

        Args:
            begin: called ahead of each message; whether anything new is started here at all.
            changed: called with each want whose chances changed.
            unbind: sends what is bound to this node of a want back to the head.
            sent_back: likewise for a claim that was undone before it had a worker.
        """
        self._begin = begin
        self._changed = changed
        self._unbind = unbind
        self._sent_back = sent_back
        return {
            m.PrepareBundles: self._prepare,
            m.CommitBundles: self._commit,
            m.ReturnBundles: self._give_back,
        }

    def _prepare(self, now: float, src: bytes, msg: m.PrepareBundles) -> list[Effect]:
        """Hold all of the bundles or none."""
        held: list[Bundle] = []
        for index, amounts in msg.bundles.items() if self._begin() else ():
            if not self._fits(amounts):
                break
            held.append(self._book.hold(msg.group.hex(), index, amounts))
        ok = len(held) == len(msg.bundles)
        for bundle in () if ok else held:
            self._book.end(bundle)
        if ok and msg.commit:
            self._use(now, msg.group.hex())
        return [Send(HEAD, m.BundlesPrepared(msg.group, msg.attempt, ok))]

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

    def _fits(self, amounts: Resources) -> bool:
        return self._room.fits(amounts, self._ledger.available)
