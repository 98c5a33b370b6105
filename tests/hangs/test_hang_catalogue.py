"""Planted hangs end, named, with the right exit code; healthy programs that look hung do not."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from catalogue import PAGE, page_section, programs, run

SECONDS = float(os.environ.get("HANGS_SECONDS", "20"))
LONG, SIDE_BY_SIDE, BUSY = 60.0, 4, 8
PLANTED, HEALTHY = programs("planted"), programs("healthy")


def test_the_page_shows_the_catalogue():
    assert page_section() in PAGE.read_text(), "run python tests/hangs/catalogue.py"


@pytest.mark.slow
@pytest.mark.parametrize("program", PLANTED, ids=lambda one: one.name)
def test_a_planted_hang_ends_and_is_named(program):
    certain = program.fields["kind"] == "certain"
    ended = run(program, SECONDS, SECONDS + 60.0)
    assert ended.after >= 0, f"it still ran:\n{ended.text}"
    assert ended.code == (1 if certain else 79), ended.text
    assert ("HangError" in ended.text) == certain, ended.text
    assert program.fields["names"] in ended.text
    assert ended.after <= (15.0 if certain else SECONDS + 15.0) + 5.0  # to end a job takes a moment, too


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", HEALTHY, ids=lambda one: one.name)
def test_a_healthy_program_that_looks_hung_is_left_alone(program):
    for package in program.fields.get("needs", "").split():
        pytest.importorskip(package)
    left = run(program, SECONDS, 3 * SECONDS + 10.0)
    assert is_left_alone(left), left.text


def is_left_alone(left):
    return (left.after < 0 or left.code == 0) and "HangError" not in left.text and "--end-hangs" not in left.text


@pytest.mark.hangs
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("busy", [0, BUSY], ids=["quiet", "loaded"])
def test_healthy_programs_four_side_by_side_are_left_alone_for_three_minutes(busy):
    """Which of them must be idle for so long is a matter of twenty minutes: `pytest -m hangs tests/hangs`."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    here = [one for one in HEALTHY if all(map(is_installed, one.fields.get("needs", "").split()))]
    try:
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            left = list(pool.map(lambda one: run(one, LONG, 3 * LONG + 10.0), here))
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    ended = {one.name: found.text for one, found in zip(here, left, strict=True) if not is_left_alone(found)}
    assert not ended, "\n".join(f"{name}:\n{text}" for name, text in ended.items())


def is_installed(package):
    return importlib.util.find_spec(package) is not None
