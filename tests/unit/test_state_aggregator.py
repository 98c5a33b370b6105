"""Which processes an incomplete answer of the state API names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hpcray.common.ids import make_proc
from hpcray.diagnostics.cluster_query import ClusterQuery, ProcessInfo
from hpcray.state.aggregator import StateAggregator, TaskHistory

MUTE, ENDED, WELL = (make_proc(0, number) for number in (1, 2, 3))


class FakeDiagnosis(ClusterQuery):
    """One process answers, one has ended, one does not answer. The raylet lists them all: it has not noticed yet."""

    def __init__(self) -> None:
        self.gone = set()

    def ask(self, procs: Iterable[bytes], what: str, *args: Any) -> dict[bytes, Any]:
        self.gone.update({ENDED}.intersection(procs))
        return {proc: {"rows": []} for proc in procs if proc == WELL}

    def processes(self) -> list[ProcessInfo]:
        return [ProcessInfo(proc, 1, "worker", 0, "h") for proc in (MUTE, ENDED, WELL)]


def test_a_process_that_has_ended_is_not_missing_though_its_raylet_still_lists_it() -> None:
    aggregator = StateAggregator.__new__(StateAggregator)
    aggregator.missing, aggregator._diagnosis = [], FakeDiagnosis()
    assert list(aggregator._query(aggregator._diagnosis.processes(), "objects")) == [WELL]
    (text,) = aggregator.missing
    assert "process 0.1" in text


def test_a_run_whose_value_was_lost_with_all_that_was_known_of_it_is_a_row() -> None:
    history = TaskHistory("01000000", {}, {}, {})
    row = {"task": b"t" * 13, "name": "f", "class": "", "state": "waiting", "worker": b"", "actor": b"", "group": ""}
    history.add_open([{**row, "resources": {}, "attempt": 1}], "01000000")
    assert [(one.attempt_number, one.state == "FINISHED") for one in history.rows()] == [(0, True), (1, False)]
