"""Where objects are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcray.api.objects import wait
from hpcray.api.session import ensure
from hpcray.base.errors import GetTimeoutError
from hpcray.core.owner.entries import STORED
from hpcray.runtime.process import Process
from hpcray.runtime.refs import ObjectRef
from hpcray.runtime.refs import current as running

Location = dict[str, Any]


def get_object_locations(obj_refs: Sequence[ObjectRef[Any]], timeout_ms: int = -1) -> dict[ObjectRef[Any], Location]:
    """Where objects are, and how large.

    Args:
        obj_refs: of any objects.
        timeout_ms: milliseconds to wait for those that are not there yet; -1: until they are.

    Returns:
        By ref: `node_ids` (hex; none for a small value, which travels inside messages), `object_size` in bytes, and
        `did_spill` (False: a node's store answers for what it spilled as for all else).

    Raises:
        GetTimeoutError: they were not there in time.
    """
    refs = list(dict.fromkeys(obj_refs))
    process = ensure()
    if refs:
        limit = None if timeout_ms < 0 else timeout_ms / 1000
        _, missing = wait(refs, num_returns=len(refs), timeout=limit, fetch_local=False)
        if missing:
            raise GetTimeoutError(f"{len(missing)} of {len(refs)} objects were not there within {timeout_ms} ms")
    return _located(process, refs)


def get_local_object_locations(obj_refs: Sequence[ObjectRef[Any]]) -> dict[ObjectRef[Any], Location]:
    """The same, as far as this process knows it now; nobody is asked.

    Raises:
        RuntimeError: hpcray is not initialized.
    """
    process = running.process
    if process is None:
        raise RuntimeError("hpcray is not initialized; hint: call init() first")
    return _located(process, list(dict.fromkeys(obj_refs)))


def _located(process: Process, refs: list[ObjectRef[Any]]) -> dict[ObjectRef[Any], Location]:
    names = {node["Index"]: node["NodeID"] for node in process.gcs.nodes()} if refs else {}
    found: dict[ObjectRef[Any], Location] = {}
    with process.engine.lock:
        for ref in refs:
            entry = process.table.entries.get(ref._id)
            where = [] if entry is None else [names[node] for node in entry.nodes or () if node in names]
            size = 0 if entry is None else (entry.size if entry.state == STORED else len(entry.value))
            found[ref] = {"node_ids": where, "object_size": size, "did_spill": False}
    return found
