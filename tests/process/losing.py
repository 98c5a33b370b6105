"""Loses objects, and makes what may be lost."""

from __future__ import annotations

from typing import Any

import numpy as np
from engine import Marks, ray

from hpcray.common.ids import raylet_of
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.core_worker import current

SIZE = 200_000


def lose(*refs: Any) -> None:
    """Drop every copy of these objects behind their owner's back."""
    process = current.process
    assert process is not None
    ids = [ref._id for ref in refs]
    with process.engine.lock:
        process.drain()
        for oid in ids:
            process.table.unmap(oid)
        process.engine.send(raylet_of(process.node), m.Free(ids, []))
        process.engine.flush()
    ray.cluster_resources()  # asked on the same way: when the answer is here, the copies are gone


@ray.remote
def make(marks: Marks, number: int = 0):
    marks.add()
    return np.full(SIZE, number)


@ray.remote
def add(marks: Marks, array: Any, number: int):
    marks.add()
    return array + number
