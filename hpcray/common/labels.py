"""Labels of nodes and conditions on them: from Ray's syntax to a canonical text for `Shape.strategy`.

A request has alternatives, the best first. Each alternative is a list of conditions that must all hold on a node.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from hpcray.common.resources import CAPTURING, GROUP

PREFIX = "labels:"
NODE_ID, ACCELERATOR = "ray.io/node-id", "ray.io/accelerator-type"
TIME_LEFT = "hpcray.io/time-left"
"""Label by which the head knows how long a node stays; nodes do not show it."""
PLACE_LABELS = ("hpcray.io/switch-path", "hpcray.io/block", "hpcray.io/rack")
"""Labels that say where in the network a node is, the most exact one first: the names of switches from the top of the
network down, joined by dots, or one name."""
Place = tuple[str, ...]
"""The place of a node in the network. The longer the part with which two places begin, the nearer the nodes are."""
NO_PLACES: Mapping[Any, Place] = {}
TPU_POD_TYPE = "ray.io/tpu-pod-type"
_VARIABLES = {
    "RAY_NODE_TYPE_NAME": "ray.io/node-group",
    "RAY_NODE_MARKET_TYPE": "ray.io/market-type",
    "RAY_NODE_REGION": "ray.io/availability-region",
    "RAY_NODE_ZONE": "ray.io/availability-zone",
    "TPU_NAME": "ray.io/tpu-slice-name",
    "TPU_WORKER_ID": "ray.io/tpu-worker-id",
    "TPU_TOPOLOGY": "ray.io/tpu-topology",
    "TPU_ACCELERATOR_TYPE": TPU_POD_TYPE,
}
IN, NOT_IN, EXISTS, DOES_NOT_EXIST = "in", "!in", "exists", "!exists"
Condition = tuple[str, str, tuple[str, ...]]
"""(label, operator, values)."""
Conditions = tuple[Condition, ...]

_WORD = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_DNS = r"[a-zA-Z0-9](?:[a-zA-Z0-9_-]{0,61}[a-zA-Z0-9])?"
_NAME = re.compile(_WORD)
_SPACE = re.compile(rf"{_DNS}(?:\.{_DNS})*")
_SELECTOR = re.compile(rf"!?(?:in)?\(\s*{_WORD}(?:\s*,\s*{_WORD})*\s*\)|!?{_WORD}")
_SHAPE_OF_NAMES = (
    "must be 63 chars or less beginning and ending with an alphanumeric character ([a-z0-9A-Z]) with dashes (-), "
    "underscores (_), dots (.), and alphanumerics between."
)


# ------------------------------------------------------------ labels and selectors


def key_problem(key: object) -> str | None:
    """Return the error text for a label name that is not valid, else None."""
    if not isinstance(key, str):
        return f"A label key must be a str, but is {key!r} of type {type(key)}"
    space, slash, name = key.rpartition("/")
    if slash and (len(space) > 253 or not _SPACE.fullmatch(space)):
        return (
            f"Invalid label key prefix `{space}`. Prefix must be a series of DNS labels separated by dots (.), not "
            "longer than 253 characters in total."
        )
    return None if _NAME.fullmatch(name) else f"Invalid label key name `{name}`. Name {_SHAPE_OF_NAMES}"


def labels_problem(labels: object) -> str | None:
    """Return the error text for labels of a node that are not valid, else None."""
    if not isinstance(labels, Mapping):
        return f"labels must be a dict from label to value, but are {labels!r} of type {type(labels)}"
    for key, value in labels.items():
        problem = key_problem(key)
        if problem:
            return problem
        if key == NODE_ID:
            return f"Custom label keys `{key}` cannot be set: every node has one of its own."
        if not isinstance(value, str):
            return f"The value of label `{key}` must be a str, but is {value!r} of type {type(value)}"
        if value and not _NAME.fullmatch(value):
            return f"Invalid label key value `{value}`. Value {_SHAPE_OF_NAMES}"
    return None


def parse_labels(text: str) -> dict[str, str]:
    """Parse labels from `key=value,key=value`.

    Raises:
        ValueError: the text has another form, or a key or value is not valid.
    """
    labels: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = pair.partition("=")
        if not equals or "=" in value:
            raise ValueError(f"labels {text!r}: {pair!r} is not key=value; hint: write region=us,rack=12")
        labels[key.strip()] = value.strip()
    problem = labels_problem(labels)
    if problem:
        raise ValueError(f"labels {text!r}: {problem}")
    return labels


def labels_of_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that variables give to a node: those of Ray's pods, and of Google's TPU hosts."""
    labels = {label: environ[variable] for variable, label in _VARIABLES.items() if environ.get(variable)}
    if label := labels.get(TPU_POD_TYPE):
        labels[ACCELERATOR] = "TPU-" + label.partition("-")[0].upper()
    return labels


def place_of(labels: Mapping[str, str]) -> Place:
    """Return the place of a node with these labels; () where none of `PLACE_LABELS` says it."""
    text = next((labels[label] for label in PLACE_LABELS if labels.get(label)), "")
    return tuple(text.split(".")) if text else ()


def nearness(one: Place, other: Place) -> int:
    """Return how many switches two places have in common, from the top of the network down."""
    common = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        common += 1
    return common


def nearest_nodes(node: int, places: Mapping[int, Place]) -> list[int]:
    """Return the nodes that are nearest to this one; none where all are equally near.

    Args:
        places: of all nodes; () for one that does not know its place.
    """
    common = {other: nearness(places[node], there) for other, there in places.items() if other != node}
    most = max(common.values(), default=0)
    found = sorted(other for other in common if common[other] == most)
    return found if len(found) < len(common) else []


def labels_text(labels: Mapping[str, str]) -> str:
    """Write labels as `key=value,key=value`, the inverse of `parse_labels`."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def selector_problem(selector: object) -> str | None:
    """Return the error text for a `label_selector` that is not valid, else None."""
    if selector is None:
        return None
    if not isinstance(selector, Mapping):
        return f'The value of "label_selector" must be a dictionary, but is {selector!r}.'
    for key, value in selector.items():
        problem = key_problem(key)
        if problem:
            return problem
        if not isinstance(value, str) or (value and not _SELECTOR.fullmatch(value)):
            return (
                f"Invalid label selector value `{value}`. The label selector value should contain optional operators "
                f"and a label value. Supported operators are: ! and {{'in'}}. Value {_SHAPE_OF_NAMES}"
            )
    return None


def fallback_problem(strategies: Any) -> str | None:
    """Return the error text for a `fallback_strategy` that is not valid, else None."""
    for strategy in strategies or ():
        if not isinstance(strategy, Mapping):
            return "Each element in fallback_strategy must be a dictionary."
        if not strategy:
            return "Empty dictionary found in `fallback_strategy`."
        for option in strategy:
            if option != "label_selector":
                return f"Unsupported option found: '{option}'. Only ['label_selector'] is currently supported."
        problem = selector_problem(strategy["label_selector"])
        if problem:
            return problem
    return None


def conditions(selector: Mapping[str, str] | None) -> Conditions:
    """Convert a valid `label_selector` to conditions."""
    return tuple(sorted(_condition(key, text) for key, text in (selector or {}).items()))


def _condition(key: str, text: str) -> Condition:
    negated = text.startswith("!")
    values = text[1:] if negated else text
    if values.endswith(")"):
        values = values[values.index("(") + 1 : -1]
    listed = tuple(sorted(value.strip() for value in values.split(",")))
    return key, NOT_IN if negated else IN, listed


# ------------------------------------------------------------ the text in Shape.strategy


def to_strategy(alternatives: Iterable[Conditions], spread: bool = False) -> str:
    """Write alternatives as the text of `Shape.strategy`. Equal alternatives give equal texts."""
    return PREFIX + json.dumps([spread, list(dict.fromkeys(alternatives))], separators=(",", ":"))


@functools.lru_cache(maxsize=4096)
def from_strategy(strategy: str) -> tuple[bool, tuple[Conditions, ...]]:
    """Parse a strategy with `PREFIX`, which may follow that of a group, to (True for SPREAD, alternatives).

    Raises:
        ValueError: the text has another form.
    """
    try:
        spread, alternatives = json.loads(strategy.partition(PREFIX)[2])
        return bool(spread), tuple(
            tuple((key, operator, tuple(values)) for key, operator, values in one) for one in alternatives
        )
    except (TypeError, ValueError):
        raise ValueError(f"strategy {strategy!r} holds no conditions on labels") from None


def time_left_label(seconds: float) -> str:
    """Return the value of `TIME_LEFT` for a node that leaves in so many seconds: the time in steps of a factor 1.4."""
    return str(max(0, math.floor(2 * math.log2(max(1.0, seconds)))))


def lasting(strategy: str, seconds: float) -> str:
    """Return the strategy with the condition that the node stays for so many seconds; those that name a node stay."""
    steps = math.ceil(2 * math.log2(max(1.0, seconds)))
    condition: Condition = (TIME_LEFT, NOT_IN, tuple(str(step) for step in range(steps)))
    if strategy in ("", "SPREAD"):
        return to_strategy([(condition,)], spread=bool(strategy))
    if not strategy.startswith(PREFIX):
        return strategy
    spread, alternatives = from_strategy(strategy)
    return to_strategy([(*one, condition) for one in alternatives], spread)


def without_time_left(alternatives: Iterable[Conditions]) -> tuple[Conditions, ...]:
    """Return the alternatives without the condition of `lasting`."""
    return tuple(tuple(one for one in conditions if one[0] != TIME_LEFT) for conditions in alternatives)


def with_conditions(group: str, strategy: str) -> str:
    """Return the strategy of a request in a placement group, `GROUP` or `CAPTURING`, with the conditions of another."""
    return f"{group}:{strategy}" if strategy.startswith(PREFIX) else group


def tier(alternatives: Iterable[Conditions], labels: Mapping[str, str]) -> int | None:
    """Return the index of the first alternative that a node with these labels satisfies; None for none."""
    for index, one in enumerate(alternatives):
        if all(holds(condition, labels) for condition in one):
            return index
    return None


def holds(condition: Condition, labels: Mapping[str, str]) -> bool:
    """Return True if a node with these labels meets the condition. An absent label is in no list."""
    key, operator, values = condition
    if operator == EXISTS:
        return key in labels
    if operator == DOES_NOT_EXIST:
        return key not in labels
    return (labels.get(key) in values) is (operator == IN)


def show_strategy(strategy: str) -> str:
    """Format the alternatives of a strategy for error texts."""
    _, alternatives = from_strategy(strategy)
    texts = [" and ".join(_show(condition) for condition in one) or "any node" for one in alternatives]
    return ", or else ".join(texts)


def _show(condition: Condition) -> str:
    key, operator, values = condition
    if key == TIME_LEFT:
        return f"{2 ** (len(values) / 2):.0f} s left"
    if operator in (EXISTS, DOES_NOT_EXIST):
        return f"{key} {'exists' if operator == EXISTS else 'does not exist'}"
    return f"{key} {'not ' if operator == NOT_IN else ''}in ({', '.join(values)})"


SOFT, FAIL = "soft", "fail"
"""Manners of a node affinity: other nodes will do where this one is gone; the request fails where this one is busy."""
UNSCHEDULABLE = "unschedulable: "
"""Prefix of the death reason of an actor that no node may ever host."""
NEAR = "near:"
"""Prefix of the strategy of a task whose arguments are on one node."""
ACTOR_SCHEDULING_CLASS = -1
"""Stands for the scheduling class in messages about an actor, which has none: its owner makes no lease request."""


def node_affinity(strategy: str) -> tuple[int, bool] | None:
    """Node index and softness of a "node:<index>[:soft|:fail]" strategy, None for the other known ones.

    Raises:
        ValueError: the strategy is none of the known ones.
    """
    if strategy in ("", "SPREAD", GROUP, CAPTURING) or strategy.startswith(NEAR) or PREFIX in strategy:
        return None
    word, _, rest = strategy.partition(":")
    index, _, manner = rest.partition(":")
    if word != "node" or not index.isdigit() or manner not in ("", SOFT, FAIL):
        raise ValueError(
            f"strategy {strategy!r} is none of '', 'SPREAD', 'node:<index>[:soft|:fail]', 'group[:capture]'"
        )
    return int(index), manner == SOFT


def fails_when_busy(strategy: str) -> bool:
    """True if a request fails where it would wait for its node."""
    return strategy.startswith("node:") and strategy.endswith(":" + FAIL)


def names_nodes(strategy: str) -> bool:
    """True if only nodes that the strategy names by their ids will do: what none of them can serve, none ever can."""
    if PREFIX in strategy:
        _, alternatives = from_strategy(strategy)
        return all(any(key == NODE_ID and operator == IN for key, operator, _ in one) for one in alternatives)
    affinity = node_affinity(strategy)
    return affinity is not None and not affinity[1]


def near_node(strategy: str) -> int | None:
    """Index of the node that has the task's arguments, for a "near:<index>" strategy; None for others."""
    return int(strategy[len(NEAR) :]) if strategy.startswith(NEAR) else None


def bound_to(strategy: str, node: int) -> bool:
    """True if the strategy names this node, softly or not."""
    affinity = node_affinity(strategy)
    return affinity is not None and affinity[0] == node
