"""Who is missed in an answer of the state API, and who is not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hpcray.base.ids import make_proc
from hpcray.runtime.diagnosis import Diagnosis, Someone
from hpcray.state.rows import Rows

MUTE, ENDED, WELL = (make_proc(0, number) for number in (1, 2, 3))


class Answers(Diagnosis):
    """One process answers, one has ended, one does not answer. The raylet lists them all: it has not noticed yet."""

    def __init__(self) -> None:
        self.gone = set()

    def ask(self, procs: Iterable[bytes], what: str, *args: Any) -> dict[bytes, Any]:
        self.gone.update({ENDED}.intersection(procs))
        return {proc: {"rows": []} for proc in procs if proc == WELL}

    def people(self) -> list[Someone]:
        return [Someone(proc, 1, "worker", 0, "h") for proc in (MUTE, ENDED, WELL)]


def test_who_has_ended_is_not_missed_though_its_raylet_still_lists_it() -> None:
    rows = Rows.__new__(Rows)
    rows.missing, rows._diagnosis = [], Answers()
    assert list(rows._ask(rows._diagnosis.people(), "objects")) == [WELL]
    (told,) = rows.missing
    assert "process 0.1" in told
