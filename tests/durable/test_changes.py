"""The catalogue of changes (`changes.py`): no result is used that may be another one, and few are computed in vain."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from changes import AGAIN, CHANGES, FOUND, FRAMES, REFUSED, TENSORS, Change
from hidden_changes import ELSEWHERE, FURTHER, HIDDEN, SCEPTICAL


def can_run(change: Change) -> bool:
    """Whether the packages that a case imports are installed."""
    imported = re.findall(r"^import (\w+)", change.before["main.py"], re.MULTILINE)
    files = {Path(name).parts[0].removesuffix(".py") for side in (change.before, change.after) for name in side}
    return all(name in files or importlib.util.find_spec(name) is not None for name in imported)


ALL = [change for change in (*CHANGES, *FRAMES, *TENSORS, *HIDDEN, *FURTHER, *SCEPTICAL) if can_run(change)]


def write(change: Change, files: dict[str, str], directory: Path) -> None:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def run(root: Path, exports: Path, mode: str, seed: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "key_process.py"), str(root), str(exports), mode],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """What became of each case before and after, and what a worker sees of the functions after."""
    root = tmp_path_factory.mktemp("catalogue")
    exports = root / "exports"
    exports.mkdir()
    for side in ("before", "somewhere/else/after"):
        for number, change in enumerate(ALL):
            files = change.before if side == "before" else change.after
            write(change, files, root / side / f"{number:03}")
    after = root / "somewhere" / "else" / "after"
    yield [
        run(root / "before", exports, "keys", "1"),
        run(after, exports, "keys", "2"),
        run(after, exports, "unlike", "3"),
    ]


@pytest.mark.parametrize("number", range(len(ALL)), ids=[change.name for change in ALL])
def test_after_a_change_a_result_is_found_if_and_only_if_it_is_the_same(
    keys: list[dict[str, Any]], number: int
) -> None:
    change = ALL[number]
    before, after, unlike = (side.get(f"{number:03}") for side in keys)
    if change.answer == REFUSED:
        assert "refused" in before and "refused" in after
        assert "the argument x" in before["refused"]
        return
    assert "key" in before and "key" in after, (before, after)
    assert (before["key"] == after["key"]) == (change.answer == FOUND), (before["parts"], after["parts"])
    assert bool(unlike) == (change.name in ELSEWHERE)  # else its results would never be kept


def test_the_catalogue_is_large_and_few_of_its_answers_are_needless() -> None:
    assert len(CHANGES) >= 60 and len(ALL) >= 200
    assert len({change.name for change in ALL}) == len(ALL)
    assert sum(change.answer == AGAIN for change in CHANGES) >= 40
    assert sum(bool(change.needless) for change in ALL) <= 3
