"""Tables of the commands that look at a running job."""

from __future__ import annotations

import sys

import pytest
from rich.text import Text

from hpcray.state.reports import format_duration, list_table, print_table, show_actors, show_stores, table_lines
from hpcray.state.schemas import NodeState, TaskState

WIDE = "x" * 300


def test_a_table_in_a_pipe_is_plain_complete_and_aligned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    print_table(["name", "value"], [["a", WIDE], ["long [name]", None], ["c", 7]])
    assert capsys.readouterr().out.splitlines() == [
        "name         value",
        f"a            {WIDE}",
        "long [name]",
        "c            7",
    ]


def test_a_table_without_rows_has_no_lines() -> None:
    assert list(table_lines(["name"], [])) == []


def test_columns_may_be_aligned_on_the_right() -> None:
    assert list(table_lines(["size", "id"], [["9 B", "a"], ["12 KiB", "b"]], right=["size"])) == [
        "  size  id",
        "   9 B  a",
        "12 KiB  b",
    ]


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_table_on_a_terminal_is_never_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    on_a_terminal(monkeypatch, width)
    print_table([f"column {i}" for i in range(7)], [["a" * 10 * i for i in range(7)], ["b"] * 7])
    lines = [Text.from_ansi(line).plain for line in capsys.readouterr().out.splitlines()]
    assert len(lines) > 3 and max(map(len, lines)) <= width
    assert any(line.startswith("not shown: ") for line in lines) is (width < 80)
    assert "…" in "".join(lines) or width == 200


def test_lists_for_people_say_node_0_and_how_long() -> None:
    task = TaskState(*["x"] * 13)
    task.node_id, task.start_time_ms, task.end_time_ms = "ab" * 28, 1000, 3500
    columns, ((*cells,),) = list_table([task], ["name", "state", "node_id", "start_time_ms"], {"ab" * 28: "node 3"})
    assert columns == ["name", "state", "duration", "node_id", "start_time_ms"]
    assert cells[2:4] == ["2.5 s", "node 3"] and cells[4].startswith("19")
    task.end_time_ms = None
    assert list_table([task], ["name", "state"], {}, now=11.0)[1] == [["x", "x", "10 s"]]
    node = NodeState("ab" * 28, "ip", True, "ALIVE", None, "n", {"memory": 1 << 30}, {})
    assert list_table([node], ["node_id", "resources_total"], {"ab" * 28: "node 3"}) == (
        ["node", "node_id", "resources_total"],
        [["node 3", "ab" * 28, {"memory": "1.000 GiB"}]],
    )


def test_an_error_of_several_lines_is_one_row() -> None:
    lines = list(
        table_lines(["task", "error"], [["f", "Traceback:\n  File x\n\x1b[31mValueError\x1b[0m: no"], ["g", ""]])
    )
    assert [line.split()[0] for line in lines] == ["task", "f", "g"]
    assert lines[1].endswith(r"Traceback: File x \x1b[31mValueError\x1b[0m: no")


def test_objects_that_differ_only_in_their_ids_are_one_row_and_owners_are_summed() -> None:
    common = {"size": 8 << 20, "state": "memory", "copy": False, "refs": 1, "borrowers": 0, "pins": [], "reads": 0}
    common |= {"owner": "worker 1.1 (actor Cache, pid 9)", "site": ""}
    listed = [{**common, "id": f"{number:032x}"} for number in range(24)]
    listed.append({**common, "id": "f" * 32, "owner": "driver 0.1 (pid 3)", "size": 4 << 20})
    row = {"node": 1, "host": "n1", "problem": "", "objects": 25, "capacity": 1 << 30, "used": 1 << 20, "list": listed}
    row |= dict.fromkeys(("on_disk", "pinned", "evictable", "spilled", "waiting"), 0)
    text = [" ".join(line.split()) for line in show_stores([row])]
    assert f"8.0 MiB 24 memory 1 + 0 borrowed worker 1.1 (actor Cache, pid 9) - {0:032x} and 23 more" in text
    assert f"4.0 MiB 1 memory 1 + 0 borrowed driver 0.1 (pid 3) - {'f' * 32}" in text
    assert "192.0 MiB 24 worker 1.1 (actor Cache, pid 9)" in text, "by owner"
    assert "created at" not in "".join(text), "nothing is recorded"
    listed[0]["site"] = "train.py:7"
    assert any(line.endswith("train.py:7") for line in show_stores([row]))


def test_an_actor_that_died_is_told_of() -> None:
    common = {"class": "Trainer", "actor": "0a", "node": 2, "restarts": 0, "name": "t", "reason": ""}
    alive = {**common, "state": "ALIVE", "ended": None}
    assert list(show_actors([])) == [] and list(show_actors([alive, alive])) == ["actors: 2 ALIVE"]
    dead = [{**common, "state": "DEAD", "ended": float(when), "reason": f"signal {when}"} for when in range(1, 6)]
    first, *rest = show_actors([alive, *dead])
    assert first == "actors: 1 ALIVE, 5 DEAD"
    assert [line.partition(": ")[2] for line in rest[:3]] == [
        f"signal {when}; hint: hpcray why 0a" for when in (5, 4, 3)
    ]
    assert "Trainer 't' died at " in rest[0] and "on node 2" in rest[0] and rest[3].startswith("  and 2 more")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(87e-6, "87 µs"), (0.0123, "12.3 ms"), (4.21, "4.21 s"), (200, "3:20"), (7400, "2:03:20"), (93800, "1-02:03:20")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
