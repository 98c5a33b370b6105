"""Scheduling strategies: from what users name (node ids) to what raylets know (node indices)."""

from __future__ import annotations

import msgspec

from hpcray.runtime.process import Process
from hpcray.runtime.refs import current
from hpcray.wire.messages import Shape

_PREFIX = "node_id:"


def resolved(process: Process, shape: Shape) -> Shape:
    """The shape with a node id replaced by the node's index. Children inherit their parent's environment variables.

    Raises:
        ValueError: there is no such node in the cluster and the affinity is hard.
    """
    strategy = shape.strategy
    worker = current.worker
    if worker is not None and worker.env:
        env = {**worker.env, **dict(shape.env)}
        shape = msgspec.structs.replace(shape, env=tuple(sorted(env.items())))
    if not strategy.startswith(_PREFIX):
        return shape
    node_id, _, soft = strategy[len(_PREFIX) :].partition(":")
    index = process.gcs.node_index(node_id)
    if index is None:
        if soft:
            return msgspec.structs.replace(shape, strategy="")
        known = ", ".join(process.gcs.node_ids())
        raise ValueError(f"no node has the id {node_id!r}; the cluster's nodes are {known}")
    return msgspec.structs.replace(shape, strategy=f"node:{index}" + (":soft" if soft else ""))
