"""The books of one raylet core, and the end of each event: grant what fits, fork, tell the head."""

from __future__ import annotations

from collections.abc import Sequence

from hpcray.base.config import Config
from hpcray.base.ids import HEAD
from hpcray.base.resources import UNIT, Resources
from hpcray.core.effects import Effect, Send
from hpcray.core.pool import WorkerPool
from hpcray.core.scheduler.claims import ClaimBook
from hpcray.core.scheduler.keeping import BundleKeeper
from hpcray.core.scheduler.ledger import Claim, Ledger
from hpcray.core.scheduler.queue import Env, Kind, WaitingRoom, Want, is_for_bundles
from hpcray.core.scheduler.reports import Reports
from hpcray.core.scheduler.wants import WantTable
from hpcray.wire import messages as m

RECLAIM_PAUSE = 0.05
RECLAIM_PERIOD = 1.0

Lack = tuple["set[str]", "tuple[bytes, int] | None"]


class Books:
    """What a node has, who wants it, who holds it.

    Args: see `RayletCore`.
    """

    def __init__(self, node: int, total: Resources, cluster_size: int, config: Config, gpu_ids: Sequence[str]) -> None:
        self.node = node
        self.pool = WorkerPool(node, total.get("CPU", 0) // UNIT, config)
        self._ledger = Ledger(node, dict(total), gpu_ids)
        self._ledger.crowd(cluster_size)
        self._room = WaitingRoom(self._ledger.devices)
        self._wants = WantTable(node, cluster_size <= 1, self._ledger.feasible)
        self._claims = ClaimBook(node, self._ledger, self.pool)
        self._reports = Reports(self._ledger, self.pool, self._room, self._wants, self._claims)
        self._keeper = BundleKeeper(self._ledger, self._room, self._wants, self._claims)
        self._dirty = False
        self._owed = False
        self._fresh: set[Kind] = set()
        self._touched: dict[int, Want] = {}
        self._refusals: list[Effect] = []
        self._reclaim_due = False
        self._reclaimed_at = -RECLAIM_PERIOD
        self._draining = False
        self._crowd = m.OthersWait()
        self._looked: tuple[list[Lack], int] = [], 0
        self._claims.wanted = self._is_wanted

    # ------------------------------------------------------------ notes during an event

    def _anything(self) -> bool:
        """Whatever is free may have changed; whether anything new is started."""
        self._dirty = True
        return not self._draining

    def _owe(self) -> None:
        """The head changed what is free here, and has to hear how it is now."""
        self._owed = True

    def _answer_last(self, answer: Effect) -> None:
        """An answer that the head should read when it knows what is free here."""
        self._refusals.append(answer)

    def _is_wanted(self, claim: Claim) -> bool:
        """Whether others wait for what a lease holds: here, or at the head."""
        return _wanted(claim, self._lacking())

    def _lacking(self) -> list[Lack]:
        """What is lacking here, and at the head; each with holder and class if only one waits for it."""
        found: list[Lack] = []
        if self._room.waiting:
            only = self._room.only()
            names = self._room.lacking(self._ledger.available)
            found.append((names, (only.holder, only.klass) if only is not None else None))
        crowd = self._crowd
        if crowd.lacking:
            found.append((set(crowd.lacking), (crowd.holder, crowd.klass) if crowd.holder else None))
        return found

    def _fits(self, want: Want) -> bool:
        return self._room.fits(want.request, self._ledger.available, want)

    def _refuse(self, holder: bytes, klass: int, count: int) -> None:
        if count > 0:
            self._refusals.append(Send(HEAD, m.GrantRefused(holder, klass, count)))

    def _refuse_actor(self, actor: bytes, reason: str) -> None:
        self._refusals.append(Send(HEAD, m.StartActorRefused(actor, reason)))

    def _unbind(self, now: float, want: Want) -> None:
        """Send what the head bound to this node, and was not served, back to the head."""
        count, want.bound = want.bound, 0
        if not count:
            return
        want.left = now
        self._changed(now, want)
        if want.attempt is not None:
            self._refusals.append(self._keeper.give_up(want.attempt))
        elif want.spec is None:
            self._refuse(want.holder, want.klass, count)
        else:
            self._refuse_actor(want.spec.actor, "")

    def _sent_back(self, now: float, claim: Claim, reason: str) -> None:
        """A claim was undone before it had a worker."""
        if claim.spec is not None:
            self._refuse_actor(claim.spec.actor, reason)
        elif claim.want.local:
            self._changed(now, claim.want)
        else:
            self._refuse(claim.holder, claim.klass, 1)

    def _activate(self, claim: Claim, out: list[Effect]) -> None:
        self._claims.activate(claim, out)
        self._reclaim_due = True

    def _changed(self, now: float, want: Want) -> None:
        """Note that a want's numbers changed."""
        self._touched[id(want)] = want
        if self._room.update(now, want):
            self._fresh.add(want.kind)
            self._reclaim_due = True

    # ------------------------------------------------------------ the end of an event

    def _finish(self, now: float, out: list[Effect]) -> list[Effect]:
        """Grant what fits, fork, and tell the head, each at most once per event."""
        if self._dirty or self._fresh:
            self._serve(now, None if self._dirty else self._fresh, out)
        out += self.pool.pump(now)
        if self._reclaim_due and self._room.waiting and now - self._reclaimed_at >= RECLAIM_PAUSE:
            self._reclaim(now, out)
        if self._claims.kept and (self._crowd.lacking or self._room.waiting):
            self._end_idling(out)
        # The head must know what is free before it hears of a refusal, or it would send the same again.
        view = self._ledger.view(now, force=self._owed or bool(self._refusals))
        if view is not None:
            out.append(Send(HEAD, view))
        self._owed = False
        for want in self._touched.values():
            unmet = self._wants.unmet(want)
            if unmet is not None:
                out.append(Send(HEAD, unmet))
        self._touched.clear()
        out += self._refusals
        self._refusals = []
        return out

    def _serve(self, now: float, kinds: set[Kind] | None, out: list[Effect]) -> None:
        def supplied(env: Env) -> bool:
            return is_for_bundles(env) or self.pool.can_supply(now, env)

        if self._draining:
            return
        for want in self._room.serve(now, self._ledger.available, supplied, kinds):
            if want.bound:
                want.bound -= 1
            self._touched[id(want)] = want
            self._reclaim_due = True
            if want.attempt is not None:
                out.append(self._keeper.served(now, want.attempt))
                self._owed = True
                continue
            if want.spec is not None:
                self._wants.actors.pop(want.spec.actor, None)
            self._claims.decide(want, out)
        self._dirty = False
        self._fresh = set()

    def _end_idling(self, out: list[Effect]) -> None:
        """Somebody waits: ask for leases that idle, and that none is kept which will."""
        lacking = self._lacking()
        if self._looked == (lacking, self._claims.kept_count):
            return
        self._looked = lacking, self._claims.kept_count
        for holder in list(self._claims.kept):
            mine = self._claims.held.get(holder, {})
            if any(_wanted(claim, lacking) for claim in mine.values()):
                del self._claims.kept[holder]
                out.append(Send(holder, m.ReclaimIdle(False)))

    def _reclaim(self, now: float, out: list[Effect]) -> None:
        """Ask holders for leases they do not use; not one that would only be asked to make room for itself."""
        self._reclaim_due = False
        self._reclaimed_at = now
        only = self._room.only()
        for holder, mine in self._claims.held.items():
            if only is None or holder != only.holder or any(claim.klass != only.klass for claim in mine.values()):
                self._claims.kept.pop(holder, None)
                out.append(Send(holder, m.ReclaimIdle()))


def _wanted(claim: Claim, lacking: list[Lack]) -> bool:
    """Whether somebody else waits for a part of what a lease holds."""
    mine = (claim.holder, claim.klass)
    return any(only != mine and not names.isdisjoint(claim.request) for names, only in lacking)
