"""Looks at the objects of the job: what the nodes' stores hold, what owners know of them. Frees by hand, too."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from hpcray.base.errors import ObjectFreedError
from hpcray.base.ids import number_of, owner_of, raylet_of, show_proc
from hpcray.core.owner.table import Entry, ObjectTable
from hpcray.runtime.answers import Answers
from hpcray.runtime.long_waits import LongWaits
from hpcray.runtime.refs import ObjectRef
from hpcray.wire import messages as m
from hpcray.wire.serialization import serialize_error

if TYPE_CHECKING:
    from hpcray.runtime.process import Process

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MOST_IDS = 10_000


class _Sited(Entry):
    """An entry that knows where in the user's program its ref was made."""

    __slots__ = ("site",)

    def __init__(self, task: Any, site: str) -> None:
        super().__init__(task)
        self.site = site


class RecordingTable(ObjectTable):
    """An object table that notes where each ref was created."""

    def create(self, oid: bytes, task: Any = None) -> Entry:
        """As of any table."""
        entry = self.entries[oid] = _Sited(task, call_site())
        return entry


def call_site() -> str:
    """`file.py:12 in function`: the innermost line of this thread that is not ours; "" where there is none."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_OURS):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


class Survey:
    """One process's part: its answers, and its questions.

    Attributes:
        answers: what it says of itself. waits: its `get`s that wait for long.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._table = process.table
        self._engine = process.engine
        self.answers = Answers(process)
        self.waits = LongWaits(process, process.config.get_report_after)

    def handlers(self) -> dict[type, Callable[[bytes, Any], None]]:
        """Message handlers, for the engine."""
        return {
            m.ListRefs: self._list_refs,
            m.FreeAsked: lambda _, msg: self._free_owned(msg.ids),
            m.Ask: self.answers.on_ask,
            m.AskRetries: self.answers.on_ask_retries,
        }

    def _list_refs(self, src: bytes, msg: m.ListRefs) -> None:
        rows = {}
        self._process.drain()
        for oid in msg.ids:
            entry = self._table.entries.get(oid)
            if entry is not None:
                rows[oid] = {
                    "local": entry.local,
                    "borrowers": len(entry.borrowers or ()),
                    "site": entry.site if isinstance(entry, _Sited) else "",
                }
        self._engine.send(src, m.GcsReply(msg.req, True, msgspec.msgpack.encode(rows)))

    # ------------------------------------------------------------ free

    def free(self, refs: Iterable[ObjectRef[Any]], local_only: bool) -> None:
        """Drop objects by hand: everywhere, or our node's copies of them."""
        engine, me = self._engine, self._process.me
        oids = list(dict.fromkeys(ref._id for ref in refs))
        with engine.lock:
            self._process.check_alive()
            self._process.drain()
            if local_only:
                for oid in oids:
                    self._table.unmap(oid)
                engine.send(raylet_of(self._process.node), m.Free(oids, []))
            else:
                self._free_owned([oid for oid in oids if oid[:8] == me])
                borrowed = [oid for oid in oids if oid[:8] != me]
                for oid in borrowed:
                    self._table.discard(oid, _freed(oid))
                for owner, theirs in _by_owner(borrowed).items():
                    engine.send(owner, m.FreeAsked(theirs))
            engine.flush()
        engine.run_after()

    def _free_owned(self, oids: Iterable[bytes]) -> None:
        for oid in oids:
            self._table.discard(oid, _freed(oid))

    # ------------------------------------------------------------ memory

    def look(self, limit: int, timeout: float) -> list[dict[str, Any]]:
        """The stores of all nodes.

        Args:
            limit: most objects per node; the largest are given.
            timeout: seconds for the nodes to answer, and again for the owners.

        Returns:
            A row per node: "node", "host", "problem" ("" unless it did not answer), then what its store says of itself
            and "list", its objects. Ids are hex, processes are for people.
        """
        gcs = self._process.gcs
        nodes = gcs.nodes()
        ask = partial(m.ListStore, limit=limit)
        alive = {raylet_of(node["Index"]): ask for node in nodes if node["Alive"]}
        stores = gcs.ask_many(alive, timeout)
        known = self._ask_owners(stores, timeout)
        rows = []
        for node in nodes:
            store = stores.get(raylet_of(node["Index"]))
            row = {"node": node["Index"], "host": node["NodeManagerHostname"], "problem": ""}
            if store is None:
                row["problem"] = f"no answer within {timeout:g} s" if node["Alive"] else f"dead: {node['DeathReason']}"
            else:
                row |= store
            rows.append(row)
        names = _names(stores)
        for row in rows:
            row["list"] = [_describe(obj, names, known) for obj in row.get("list", ())]
            row.pop("processes", None)
        return rows

    def _ask_owners(self, stores: dict[bytes, Any], timeout: float) -> dict[bytes, Any]:
        """What the owners that live know of the objects: by id."""
        alive = {proc for store in stores.values() for proc, _, _ in store["processes"]}
        ids = {obj["id"] for store in stores.values() for obj in store["list"]}
        owners = {owner: oids for owner, oids in _by_owner(ids).items() if owner in alive}
        known: dict[bytes, Any] = {}
        for start in range(0, max(map(len, owners.values()), default=0), _MOST_IDS):
            part = {owner: oids[start : start + _MOST_IDS] for owner, oids in owners.items() if oids[start:]}
            questions = {owner: partial(m.ListRefs, ids=oids) for owner, oids in part.items()}
            for rows in self._process.gcs.ask_many(questions, timeout).values():
                known |= rows
        return known


def _freed(oid: bytes) -> bytes:
    return serialize_error(ObjectFreedError(oid.hex(), show_proc(owner_of(oid))))


def _by_owner(oids: Iterable[bytes]) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = defaultdict(list)
    for oid in oids:
        found[owner_of(oid)].append(oid)
    return found


def _names(stores: dict[bytes, Any]) -> dict[bytes, str]:
    """What people call the processes."""
    found = {}
    for store in stores.values():
        for proc, pid, kind in store["processes"]:
            found[proc] = f"{'driver' if kind != 'worker' else kind} {show_proc(proc).split()[-1]} (pid {pid})"
    return found


def _describe(obj: dict[str, Any], names: dict[bytes, str], known: dict[bytes, Any]) -> dict[str, Any]:
    oid = obj["id"]
    owner = owner_of(oid)
    ref = known.get(oid)
    return {
        **obj,
        "id": oid.hex(),
        "owner": names.get(owner, f"{show_proc(owner)} (not found)") if number_of(owner) else show_proc(owner),
        "pins": [names.get(proc, show_proc(proc)) for proc in obj["pins"]],
        "refs": ref["local"] if ref else None,
        "borrowers": ref["borrowers"] if ref else None,
        "site": ref["site"] if ref else "",
    }
