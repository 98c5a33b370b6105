"""Progress bars of several processes in one terminal."""

from __future__ import annotations

from typing import Any

import pytest

from hpcray.experimental.tqdm_ray import BarManager

pytest.importorskip("tqdm")


Screen = pytest.CaptureFixture[str]


def state(uuid: str, x: int, **more: Any) -> dict[str, Any]:
    usual = {"desc": "d", "total": 4, "unit": "it", "pos": 0, "ip": "10.0.0.1", "pid": 1, "closed": False}
    return {"uuid": uuid, "x": x, **usual, **more}


def places(manager: BarManager) -> dict[str, int]:
    return {uuid: -bar.bar.pos for group in manager.bar_groups.values() for uuid, bar in group.bars_by_uuid.items()}


def test_the_bars_of_each_process_lie_below_those_of_the_process_before(capsys: Screen) -> None:
    manager = BarManager()
    manager.process_state_update(state("a", 1))
    manager.process_state_update(state("c", 1, pid=2))
    manager.process_state_update(state("b", 1, pos=1))
    assert places(manager) == {"a": 0, "b": 1, "c": 2}
    manager.process_state_update(state("b", 4, pos=1, closed=True))
    assert places(manager) == {"a": 0, "c": 1}
    assert "(pid=1, ip=10.0.0.1) d: 100%" in capsys.readouterr().err
    manager.forget("10.0.0.1", 1)
    assert places(manager) == {"c": 0}


def test_a_bar_shows_what_changed_of_it(capsys: Screen) -> None:
    manager = BarManager()
    manager.process_state_update(state("a", 1))
    manager.process_state_update(state("a", 3, desc="e", total=6))
    ((bar,),) = [group.bars_by_uuid.values() for group in manager.bar_groups.values()]
    assert (bar.bar.n, bar.bar.total) == (3, 6) and "e" in bar.bar.desc
    manager.process_state_update(state("a", 6, desc="e", total=6, closed=True))
    assert not places(manager) and "e: 100%" in capsys.readouterr().err


def test_hidden_bars_are_drawn_with_what_came_meanwhile(capsys: Screen) -> None:
    manager = BarManager()
    manager.process_state_update(state("a", 1))
    manager.hide_bars()
    manager.hide_bars()
    capsys.readouterr()
    manager.process_state_update(state("a", 2))
    manager.process_state_update(state("a", 3))
    manager.process_state_update(state("b", 1, pid=2))
    assert not capsys.readouterr().err and manager.num_hides == 1
    manager.unhide_bars()
    assert [bar.bar.n for group in manager.bar_groups.values() for bar in group.bars_by_uuid.values()] == [3, 1]


def test_many_changes_at_once_are_few_drawings(capsys: Screen) -> None:
    manager = BarManager()
    for number in range(30):
        manager.process_state_update(state(str(number), 0, pid=number))
    capsys.readouterr()
    for number in range(30):
        manager.process_state_update(state(str(number), 1, pid=number))
    assert capsys.readouterr().err.count("| 1") < 15
