"""Second copies, as `put(replicas=2)` asks for them."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from table_kit import ME, SIZE, Table, put_id

from hpcray.common.ids import raylet_of
from hpcray.core.core_worker.object_table import Waiter
from hpcray.diagnostics.record_replay import record_table, replay
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.object_writer import ObjectReplicator


class Process:
    """What `ObjectReplicator` needs of one, on node 1 of two; who blocks is interrupted."""

    node = 1

    def __init__(self, table: Table) -> None:
        self.table = table
        self.engine = SimpleNamespace(lock=contextlib.nullcontext())
        self.gcs = SimpleNamespace(nodes=lambda: [{"Index": 1, "Alive": True}, {"Index": 4, "Alive": True}])
        self._warned: set[str] = set()

    def block(self, waiter: Waiter, deadline: float | None) -> bool:
        raise KeyboardInterrupt


@pytest.mark.parametrize("end", ["it is kept", "it is full", "it dies", "the object goes"])
def test_an_interrupted_replication_leaves_no_waiter(end: str) -> None:
    table = Table()
    table.stored(put_id(), node=1)
    process: Any = Process(table)
    with pytest.raises(KeyboardInterrupt):
        ObjectReplicator(process, process.gcs).replicate(SimpleNamespace(_id=put_id()), 2)  # type: ignore[arg-type]
    assert table.said() == [(raylet_of(4), m.Open(put_id(), SIZE, [1], pin_replica=True))]
    assert not table.replicas._waiters
    if end == "it dies":
        table.recovery.node_died(4, "power")
    elif end == "the object goes":
        table.replicas.object_gone(put_id())
    else:
        table.recovery.on_replica(put_id(), 4, "full" if end == "it is full" else "")
    assert not table.replicas.failed and not table.fired
    assert set(table.replicas.held) == ({put_id()} if end == "it is kept" else set())


def test_two_who_want_the_same_copy_both_hear_of_it() -> None:
    """`put(replicas=2)`, and an evacuation of the first node."""
    table = Table()
    table.stored(put_id(), node=1)
    waiters = [Waiter(), Waiter()]
    for waiter in waiters:
        table.recovery.replicate(put_id(), 4, waiter)
    assert table.said() == [(raylet_of(4), m.Open(put_id(), SIZE, [1], pin_replica=True))]
    table.recovery.on_replica(put_id(), 4, "")
    assert [waiter.count for waiter in waiters] == [0, 0]
    table.check_invariants()


def test_a_recorded_table_notes_the_end_of_a_replication_wait() -> None:
    fired: list[Waiter] = []
    table, recorder = record_table(ME, lambda dest, msg: None, fired.append, lambda oid, reason, why: b"lost\2")
    table.create(put_id())
    table.set_stored(put_id(), SIZE, 1)
    for answered in (True, False):
        table.recovery.replicate(put_id(), 4, Waiter())
        if answered:
            table.on_replica(put_id(), 4, "full")
        assert table.replicas.take_failure(put_id(), 4) == ("full" if answered else "")
    table.on_replica(put_id(), 4, "full")
    assert len(fired) == 1
    done = replay(recorder.record)
    assert done.steps == len(recorder.record.inputs) and not done.differences and not done.error
