"""Sentences about requests and what there is for them."""

from __future__ import annotations

from collections.abc import Mapping

from hpcray.base.bundle_names import bundle_of, plain
from hpcray.base.labels import PREFIX, show_strategy
from hpcray.base.resources import Resources, to_amounts
from hpcray.core.scheduler.nodes import NodeState
from hpcray.core.scheduler.wants import node_affinity
from hpcray.wire.messages import Shape

REPORT_AFTER = 10.0
"""Whoever has waited this long, in seconds, is told for what."""


def describe(nodes: Mapping[int, NodeState], about: Resources | None = None, labels: bool = False) -> str:
    """What every node has; nodes with the same together.

    Args:
        about: only these resources, and how much of them is free.
        labels: with the labels that were given to it.
    """
    groups: dict[str, list[int]] = {}
    for index, state in sorted(nodes.items()):
        text = (
            show(state.info.total)
            if about is None
            else free_of(about, {**state.available, **state.in_bundles}, state.total)
        )
        if labels:
            given = ", ".join(f"{key}={value}" for key, value in sorted(state.info.labels.items()))
            text += f" labels ({given})"
        groups.setdefault(text, []).append(index)
    parts = []
    for text, indices in groups.items():
        hosts = sorted({nodes[index].info.host for index in indices})
        where = f"node {indices[0]}" if len(indices) == 1 else f"nodes {', '.join(map(str, indices[:16]))}"
        more = " …" if len(indices) > 16 else ""
        parts.append(f"{where}{more} ({', '.join(hosts[:4])}{' …' if len(hosts) > 4 else ''}): {text}")
    return "; ".join(parts) or "there is no node"


def why_infeasible(nodes: Mapping[int, NodeState], dead: Mapping[int, str], shape: Shape, what: str) -> str:
    """The sentence for a request that no node can ever serve."""
    text = f"{what} asks for {show(dict(shape.resources))}"
    by_labels = shape.strategy.startswith(PREFIX)
    affinity = node_affinity(shape.strategy)
    if by_labels:
        text += f" on a node with {show_strategy(shape.strategy)}, which no node can serve"
    elif affinity is not None:
        index = affinity[0]
        died = f" (it died: {dead[index]})" if index in dead else ""
        text += f" on node {index}{died}, which cannot serve it"
    else:
        text += ", which no node can serve"
    hint = "ask for less, or start nodes that have it"
    return f"{text}. What there is: {describe(nodes, labels=by_labels)}. hint: {hint}; it waits"


def free_of(about: Resources, available: Resources, total: Resources) -> str:
    """`{CPU: 1} of {CPU: 4}`, for the resources in `about`."""
    return " of ".join(show({name: amounts.get(name, 0) for name in about}) for amounts in (available, total))


def waiting_text(what: str, request: Resources, there: str) -> str:
    """The sentence for a request that waits for others; `there` says what is free."""
    if bundle_of(request.items()) is not None:
        what += " in a placement group"
    hint = "hint: wait, hold less (actors keep theirs for life), or start more nodes; `hpcray status` shows more"
    if "GPU" in request:
        hint += ". A GPU that is shared by fractions serves no whole request"
    return (
        f"{what} asks for {show(request)} and has waited for {REPORT_AFTER:g} s, while others hold what it needs. "
        f"Free now: {there}. {hint}"
    )


def show(request: Resources) -> str:
    """`{CPU: 4, GPU: 0.5}`, bytes of memory in GiB."""
    parts = []
    for name, amount in sorted(to_amounts(plain(request)).items()):
        if name in ("memory", "object_store_memory"):
            parts.append(f"{name}: {amount / 2**30:.1f} GiB")
        elif not name.startswith("node:"):
            parts.append(f"{name}: {amount:g}")
    return "{" + ", ".join(parts) + "}"
