"""The leak check of the tests blames what a test's own processes left in /dev/shm, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import pytest
from helpers.leaks import LeakCheck, wait_until

MAKER = """
import mmap, sys, time
with open(sys.argv[1], "wb+") as file:
    file.truncate(4096)
    held = mmap.mmap(file.fileno(), 4096)
print("made", flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def leaks() -> Iterator[LeakCheck]:
    check = LeakCheck()
    yield check
    check.clean()


@pytest.fixture
def path() -> Iterator[str]:
    path = f"/dev/shm/hct-{uuid.uuid4().hex}"
    yield path
    if os.path.exists(path):
        os.unlink(path)


def make(path: str, environ: dict[str, str], seconds: float = 0.5) -> None:
    """A process maps a new file, and ends without removing it."""
    subprocess.run([sys.executable, "-c", MAKER, path, str(seconds)], check=True, env={**os.environ, **environ})


def test_a_file_that_the_test_left_is_found(leaks: LeakCheck, path: str) -> None:
    make(path, leaks.environ)
    wait_until(lambda: leaks.left().get("/dev/shm") == {os.path.basename(path)}, "the file is blamed on the test")
    with pytest.raises(AssertionError, match="still there"):
        leaks.check(0.1)
    os.unlink(path)
    leaks.check(0.1)


def test_a_file_of_another_job_is_not_blamed_on_the_test(leaks: LeakCheck, path: str) -> None:
    make(path, {}, 0.0)
    time.sleep(0.3)  # more than the check takes to look at it
    assert os.path.exists(path)
    assert not leaks.left()
