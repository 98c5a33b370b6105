"""Nodes for the bundles of a placement group: among a few good ones first, among all when these will not do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from hpcray.base.labels import from_strategy, tier
from hpcray.base.resources import Resources, add
from hpcray.core.scheduler.placement import ClusterView
from hpcray.core.scheduler.planning import PACK, STRICT_PACK, Bundles, Plan, plan
from hpcray.wire.messages import GroupSpec, Shape

FEW = 16
"""Up to so many nodes are all looked at."""
KINDS = 8
"""In a large cluster, good nodes are sought for so many different bundles of a group."""
_MARK = "label of bundle "
_PLENTY = 1 << 60


class Placeable(Protocol):
    """What is asked of a group."""

    spec: GroupSpec
    avoid: set[int]

    def missing(self) -> dict[int, Resources]:
        """The bundles that have no place."""

    def used(self) -> dict[int, int]:
        """How many bundles are where."""


class Seeker:
    """Plans groups with what the head knows of every node."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._failures: set[tuple[object, ...]] = set()

    def forget_failures(self) -> None:
        """There may be more room now than when a plan was last sought in vain."""
        self._failures.clear()

    def find(self, group: Placeable) -> Plan | None:
        """A plan with what is free now."""
        bundles, used = group.missing(), group.used()
        if self._failures and _kind(group, bundles, used) in self._failures:
            return None
        nodes = self._view.nodes
        if len(nodes) > FEW:
            good = [n for n in self._good(group.spec, bundles, used) if n not in group.avoid]
            found = self._plan(group.spec, bundles, {n: nodes[n].available for n in good}, used)
            if found is not None:
                return found
        avoid = group.avoid
        free = {n: state.available for n, state in nodes.items() if n not in avoid}
        found = self._plan(group.spec, bundles, free, used)
        if found is None and not group.avoid:
            self._failures.add(_kind(group, bundles, used))
        return found

    def find_reachable(self, group: Placeable) -> Plan | None:
        """A plan with what would be free if all but actors and other groups ended."""
        free = {n: state.reachable() for n, state in self._view.nodes.items() if n not in group.avoid}
        return self._plan(group.spec, group.missing(), free, group.used())

    def possible(self, group: Placeable) -> bool:
        """Whether the cluster could hold the group if nothing else were there."""
        empty = {node: state.info.total for node, state in self._view.nodes.items()}
        return self._plan(group.spec, dict(enumerate(group.spec.bundles)), empty, {}) is not None

    def _plan(
        self, spec: GroupSpec, bundles: Bundles, free: Mapping[int, Resources], used: Mapping[int, int]
    ) -> Plan | None:
        if any(spec.selectors):
            bundles, free = self._with_labels(spec.selectors, bundles, free)
        return plan(bundles, spec.strategy, free, used)

    def _with_labels(
        self, selectors: Sequence[str], bundles: Bundles, free: Mapping[int, Resources]
    ) -> tuple[Bundles, Mapping[int, Resources]]:
        """A condition on labels is a resource of which the nodes that meet it have plenty."""
        asked = {index: {**amounts, _MARK + selectors[index]: 1} for index, amounts in bundles.items()}
        texts = {selectors[index] for index in bundles}
        wanted = {text: from_strategy(text)[1] for text in texts if text}
        there: dict[int, Resources] = {}
        for node, amounts in free.items():
            labels = self._view.nodes[node].labels
            met = {text for text in texts if not text or tier(wanted[text], labels) is not None}
            there[node] = {**amounts, **dict.fromkeys((_MARK + text for text in met), _PLENTY)}
        return asked, there

    def _good(self, spec: GroupSpec, bundles: Bundles, used: Mapping[int, int]) -> Iterable[int]:
        """A few nodes that have room, with those that the group is on."""
        packs = spec.strategy in (PACK, STRICT_PACK)
        kinds: dict[Shape, None] = {}
        if packs:
            need: Resources = {}
            for amounts in bundles.values():
                add(need, amounts)
            kinds[_shape(need, "")] = None
        for index, amounts in bundles.items():
            selector = spec.selectors[index] if spec.selectors else ""
            kinds[_shape(amounts, selector or ("" if packs else "SPREAD"))] = None
            if len(kinds) > KINDS:
                break
        found = {node: None for node in used if node in self._view.nodes}
        for shape in kinds:
            found.update(dict.fromkeys(self._view.roomy(shape, len(bundles) + 2)))
        return found


def _shape(amounts: Resources, strategy: str) -> Shape:
    return Shape(tuple(sorted(amounts.items())), strategy)


def _kind(group: Placeable, bundles: Bundles, used: Mapping[int, int]) -> tuple[object, ...]:
    """Groups of one kind find the same place, or none."""
    asked = tuple(tuple(sorted(amounts.items())) for amounts in bundles.values())
    selectors = tuple(group.spec.selectors[index] for index in bundles) if group.spec.selectors else ()
    return group.spec.strategy, asked, selectors, tuple(sorted(used.items()))
