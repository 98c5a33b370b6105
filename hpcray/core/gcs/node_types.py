"""The kinds of nodes that a job may get while it runs, in the words of Ray's `available_node_types`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from hpcray.common.labels import (
    PREFIX,
    TIME_LEFT,
    from_strategy,
    labels_problem,
    names_nodes,
    node_affinity,
    tier,
    time_left_label,
)
from hpcray.common.resources import IMPLICIT, Resources, bundle_of, fits, to_units
from hpcray.protocol.messages import NodeInfo, Shape

DEFAULT_TYPE = "worker"
"""Name of the only type where none is configured: nodes with the CPUs and GPUs of the first node."""
TYPE_LABEL = "ray.io/node-group"
"""Label of every node of a type."""
_WHOLE = "available_node_types"
_FIELDS = ("resources", "labels", "min_workers", "max_workers", "node_config")


class NodeType(msgspec.Struct, frozen=True):
    """One kind of node.

    Attributes:
        resources: what each node has. labels: likewise.
        min_workers, max_workers: how many there may be; None: as many as the job may have nodes.
        node_config: options of sbatch by their long names, such as partition, constraint and time.
        measured: whether `resources` are those that a node of the type has shown.
    """

    name: str
    resources: Resources
    labels: dict[str, str] = {}
    min_workers: int = 0
    max_workers: int | None = None
    node_config: dict[str, str | bool] = {}
    measured: bool = False

    @property
    def all_labels(self) -> dict[str, str]:
        """The labels that its nodes show."""
        return {**self.labels, TYPE_LABEL: self.name}


def parse_node_types(text: str) -> dict[str, NodeType]:
    """Parse node types from JSON: an object from names to types, or one that has it under `available_node_types`.

    Raises:
        ValueError: the text is not valid; the message names the place.
    """
    if not text:
        return {}
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(f"node types: {error}; hint: a JSON object from names to node types") from None
    if isinstance(found, dict) and isinstance(found.get(_WHOLE), dict):
        found = found[_WHOLE]
    if not isinstance(found, dict) or not found:
        raise ValueError("node types: this is no JSON object from names to node types")
    return {name: _parse_type(name, given) for name, given in found.items()}


def _parse_type(name: str, given: Any) -> NodeType:
    where = f"node type {name!r}"
    if problem := labels_problem({"type": name}):
        raise ValueError(f"{where}: {problem}")
    if not isinstance(given, dict) or not isinstance(given.get("resources"), dict):
        raise ValueError(f'{where}: it needs "resources", such as {{"CPU": 16}}')
    if unknown := sorted(given.keys() - set(_FIELDS)):
        raise ValueError(f"{where}: unknown {', '.join(unknown)}; hint: {', '.join(_FIELDS)}")
    labels, config = given.get("labels", {}), given.get("node_config", {})
    if problem := labels_problem(labels):
        raise ValueError(f"{where}: {problem}")
    least, most = given.get("min_workers", 0), given.get("max_workers")
    for count in (least, most):
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
            raise ValueError(f"{where}: {count!r} is no number of nodes")
    if not isinstance(config, dict) or not all(isinstance(value, (str, int, bool)) for value in config.values()):
        raise ValueError(f"{where}: node_config holds options of sbatch by their long names")
    options = {
        option.lstrip("-").replace("_", "-"): value if isinstance(value, bool) else str(value)
        for option, value in config.items()
    }
    try:
        return NodeType(name, to_units(given["resources"]), labels, least, most, options)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


class NodeTypeTable:
    """The types of one job, and what its nodes show of them.

    Args:
        types: by name; empty: one type after the first node, as soon as that is known.
        scales: whether the job gets further nodes at all.
    """

    def __init__(self, types: Mapping[str, NodeType], scales: bool) -> None:
        self._types = dict(types)
        self._scales = scales
        self._unavailable: set[str] = set()
        self._limits: dict[str, float] = {}

    @property
    def known(self) -> bool:
        """True if the job gets further nodes, and their types are known."""
        return self._scales and bool(self._types)

    def all(self) -> dict[str, NodeType]:
        """The types by name, in the order of the configuration."""
        return self._types

    def nodes_joined(self, nodes: Iterable[NodeInfo]) -> None:
        """Learn from nodes: the default type, and what nodes of a type have."""
        for info in nodes if self._scales else ():
            if not self._types:
                resources = {name: units for name, units in info.total.items() if name in ("CPU", "GPU", "memory")}
                self._types[DEFAULT_TYPE] = NodeType(DEFAULT_TYPE, resources)
            found = self._types.get(info.labels.get(TYPE_LABEL, ""))
            if found is not None and info.joined and not found.measured:
                shown = {name: units for name, units in info.total.items() if not name.startswith("node:")}
                self._types[found.name] = msgspec.structs.replace(found, resources=shown, measured=True)

    def set_time_left(self, types: Mapping[str, float], job: float) -> bool:
        """Nodes of these types stay for so many seconds, as the first one did, and no node stays longer than the job.
        Returns whether that makes a difference."""
        changed = False
        for name, found in self._types.items():
            limit = self._limits.setdefault(name, types[name]) if name in types else self._limits.get(name, math.inf)
            left = min(limit, job)
            label = time_left_label(left) if left < math.inf else ""
            if found.labels.get(TIME_LEFT, "") != label:
                labels = {key: text for key, text in found.labels.items() if key != TIME_LEFT}
                labels |= {TIME_LEFT: label} if label else {}
                self._types[name] = msgspec.structs.replace(found, labels=labels)
                changed = True
        return changed

    def set_unavailable(self, names: Iterable[str]) -> bool:
        """These types cannot be started at all. Returns whether that is news."""
        before, self._unavailable = self._unavailable, set(names)
        return before != self._unavailable

    def may_come(self, shape: Shape) -> bool:
        """Return True if a further node could serve the request."""
        if not self.known or bundle_of(shape.resources) is not None or names_nodes(shape.strategy):
            return False
        return any(
            serves(found.resources, found.all_labels, shape)
            for found in self._types.values()
            if found.name not in self._unavailable and found.max_workers != 0
        )


def serves(total: Mapping[str, int], labels: Mapping[str, str], shape: Shape) -> bool:
    """Return whether an empty node serves the request."""
    request = {name: units for name, units in shape.resources if not name.startswith(IMPLICIT)}
    return fits(request, total) and allows(labels, shape.strategy)


def allows(labels: Mapping[str, str], strategy: str) -> bool:
    """Return whether a node with these labels, which no strategy names, may serve a request with this strategy."""
    if PREFIX in strategy:
        return tier(from_strategy(strategy)[1], labels) is not None
    affinity = node_affinity(strategy)
    return affinity is None or affinity[1]
