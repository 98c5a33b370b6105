"""Waits as nodes and edges, from the lines of `hpcray why`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hpcray.diagnostics.wait_graph import WaitReason

_MOST = 300  # boxes


def wait_graph(findings: Iterable[WaitReason]) -> dict[str, Any]:
    """Return "nodes", each with "depth" and "text", "edges" from who waits to what it waits for, and "more".

    An object or process that occurs twice is one node, so that a circle of waits is seen as one.
    """
    nodes: list[dict[str, Any]] = []
    edges: list[tuple[int, int]] = []
    known: dict[str, int] = {}
    above: list[int] = []  # the nodes from the top down to the present line
    more = 0
    for one in findings:
        del above[one.depth :]
        number = known.get(one.ident, -1) if one.ident else -1
        if number < 0:
            if len(nodes) >= _MOST:
                more += 1
                above += [above[-1]] if above else []
                continue
            number = len(nodes)
            nodes.append({"depth": one.depth, "text": one.text, "ident": one.ident})
            if one.ident:
                known[one.ident] = number
        elif one.text not in nodes[number]["text"] and not one.text.endswith("see above"):
            nodes[number]["text"] += f"\n{one.text}"
        if above and (edge := (above[-1], number)) not in edges and edge[0] != edge[1]:
            edges.append(edge)
        above.append(number)
    return {"nodes": nodes, "edges": edges, "more": more}
