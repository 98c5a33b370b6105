"""Bundles of placement groups on one node. Each is a small ledger of its own, filled from the node's.

What is free in the bundles that are committed is shown by the names in `base.bundle_names`, apart from what is free on
the node: who uses no group has nothing to do with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from hpcray.base.bundle_names import ALL_SLOTS, ANY, SLOTS, name_in
from hpcray.base.resources import Resources, add, fits, subtract
from hpcray.core.scheduler.devices import GPU, DeviceBook
from hpcray.core.scheduler.ledger import Claim, Ledger
from hpcray.core.scheduler.queue import Want


@dataclass(slots=True, eq=False)
class Bundle:
    """What the node holds for one bundle.

    Attributes:
        amounts, devices: what the node gave, and which GPUs.
        books: who has what of it.
        claims: what runs in it, or is about to.
        committed: it may be used. leaving: no longer; it goes back to the node when the last claim has ended.
    """

    group: str
    index: int
    amounts: Resources
    devices: tuple[int, ...]
    books: Ledger
    claims: set[Claim] = field(default_factory=set)
    committed: bool = False
    leaving: bool = False

    def fits(self, request: Resources) -> bool:
        """Whether there is room now for a request by the names inside."""
        if not self.committed or self.leaving or not fits(request, self.books.available):
            return False
        return self.books.devices is None or GPU not in request or self.books.devices.fits(request[GPU])


class BundleBook:
    """All bundles of one node.

    Attributes:
        shown: what is free in the bundles that may be used.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._node = ledger
        self._groups: dict[str, dict[int, Bundle]] = {}
        self.shown: Resources = {}
        self._news: set[str] = set()
        self._common: dict[str, set[str]] = {}
        ledger.bundles = self

    def __iter__(self) -> Iterator[Bundle]:
        return (bundle for mine in self._groups.values() for bundle in mine.values())

    def of(self, group: str) -> list[Bundle]:
        """The bundles of a group here."""
        return list(self._groups.get(group, {}).values())

    def has(self, group: str, index: int) -> bool:
        """Whether this bundle is here, perhaps with something in it that has not ended yet."""
        return index in self._groups.get(group, ())

    @property
    def has_news(self) -> bool:
        """Whether anything of `shown` has changed that the head cannot know."""
        return bool(self._news)

    def tell_all(self) -> None:
        """The head knows nothing of what is free in them: all of it is news."""
        self._news.update(self.shown)

    def news(self) -> Resources:
        """What of `shown` has changed since the last call."""
        found = {name: self.shown[name] for name in self._news if name in self.shown}
        self._news.clear()
        return found

    # ------------------------------------------------------------ the bundles themselves

    def hold(self, group: str, index: int, amounts: Resources) -> Bundle:
        """Take a bundle's resources from the node; the caller has seen that they fit.

        Raises:
            ValueError: the node has this bundle already, or its GPUs do not fit; nothing is held.
        """
        node, mine = self._node, self._groups.get(group, {})
        if index in mine:
            raise ValueError(f"node {node.node} has bundle {index} of group {group} already")
        devices: tuple[int, ...] = ()
        if node.devices is not None and GPU in amounts:
            devices = node.devices.take(amounts[GPU], lasting=True)
        subtract(node.available, amounts)
        add(node.actors, amounts)
        books = Ledger(node.node, {**amounts, SLOTS: ALL_SLOTS})
        if node.devices is not None and devices:
            books.devices = DeviceBook([node.devices.ids[device] for device in devices], amounts[GPU])
        bundle = Bundle(group, index, dict(amounts), devices, books)
        self._groups.setdefault(group, {})[index] = bundle
        return bundle

    def commit(self, bundle: Bundle) -> None:
        """From now on it may be used."""
        if not bundle.committed:
            bundle.committed = True
            alone = bundle.group not in self._common
            common = self._common.setdefault(bundle.group, set())
            common.update(name_in(bundle.group, ANY, name) for name in bundle.books.total)
            for name, units in bundle.books.total.items():
                for shown in _shown(bundle, name):
                    self._node.total[shown] = self._node.total.get(shown, 0) + units
                    self.shown[shown] = self.shown.get(shown, 0) + units
                    if not alone:  # else it is empty, as the head knows
                        self._news.add(shown)

    def end(self, bundle: Bundle) -> None:
        """Nobody may use it any more; it is the node's again when its last claim has ended."""
        if bundle.leaving:
            return
        bundle.leaving = True
        if bundle.committed:
            self._hide(bundle)
        self._settle(bundle)

    # ------------------------------------------------------------ claims in bundles

    def fits(self, want: Want) -> bool:
        """Whether one bundle has room for all that the want asks for."""
        return self._choose(want) is not None

    def take(self, claim: Claim) -> None:
        """Hold what the claim asks for, in the bundle it names or else in the first with room.

        Raises:
            ValueError: there is no room; nothing is held.
        """
        bundle = self._choose(claim.want)
        if bundle is None:
            raise ValueError(f"{claim.want.request} do not fit into a bundle of node {self._node.node}")
        claim.bundle = bundle
        claim.request = claim.want.inside
        bundle.claims.add(claim)
        bundle.books.take(claim)
        self._show(bundle, claim.request)

    def give(self, claim: Claim, bundle: Bundle) -> None:
        """Free what the claim holds."""
        claim.bundle = None
        bundle.claims.discard(claim)
        bundle.books.give(claim)
        self._show(bundle, claim.request)
        if bundle.leaving:
            self._settle(bundle)

    def lend(self, claim: Claim, bundle: Bundle) -> bool:
        """Its CPU may be used by others of the bundle; whether anything changed."""
        changed = bundle.books.lend(claim)
        self._show(bundle, claim.request)
        return changed

    def resume(self, claim: Claim, bundle: Bundle) -> None:
        """It takes its CPU back."""
        bundle.books.resume(claim)
        self._show(bundle, claim.request)

    # ------------------------------------------------------------ inside

    def _choose(self, want: Want) -> Bundle | None:
        assert want.bundle is not None
        group, index = want.bundle
        mine = self._groups.get(group)
        if mine is None:
            return None
        if index != ANY:
            bundle = mine.get(index)
            return bundle if bundle is not None and bundle.fits(want.inside) else None
        return next((mine[index] for index in sorted(mine) if mine[index].fits(want.inside)), None)

    def _show(self, bundle: Bundle, changed: Iterable[str]) -> None:
        """Bring what the node shows of a bundle up to date."""
        if not bundle.committed or bundle.leaving:
            return
        for figures, inside in (
            (self.shown, bundle.books.available),
            (self._node.actors, bundle.books.actors),
        ):
            for name in changed:
                one, all_of_group = _shown(bundle, name)
                difference = inside.get(name, 0) - figures.get(one, 0)
                if difference:
                    figures[one] = figures.get(one, 0) + difference
                    figures[all_of_group] = figures.get(all_of_group, 0) + difference
                    self._news |= {one, all_of_group}

    def _hide(self, bundle: Bundle) -> None:
        figures = (self._node.total, self.shown, self._node.actors)
        names = [_shown(bundle, name) for name in bundle.books.total]
        rest = self._groups[bundle.group].values()
        last = not any(other.committed and not other.leaving for other in rest)
        for known in figures:
            for one, all_of_group in names:
                units = known.pop(one, 0)
                if not last and all_of_group in known:
                    known[all_of_group] -= units
                    self._news.add(all_of_group)
        if last:
            for name in self._common.pop(bundle.group):
                for known in figures:
                    known.pop(name, None)

    def _settle(self, bundle: Bundle) -> None:
        """Give an ended bundle back to the node, unless something still runs in it."""
        if bundle.claims:
            return
        node = self._node
        mine = self._groups[bundle.group]
        del mine[bundle.index]
        if not mine:
            del self._groups[bundle.group]
        add(node.available, bundle.amounts)
        subtract(node.actors, bundle.amounts)
        if bundle.devices and node.devices is not None:
            node.devices.give(bundle.devices, bundle.amounts[GPU], lasting=True)


def _shown(bundle: Bundle, name: str) -> tuple[str, str]:
    return name_in(bundle.group, bundle.index, name), name_in(bundle.group, ANY, name)
