"""Standard output and error, silenced for the libraries' last words."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """\
import os, sys
from hpcray.host.console import silenced
{before}
print("before")
with silenced({wanted}):
    print("lost"); sys.stdout.flush()
    os.write(1, b"lost\\n"); os.write(2, b"lost\\n")
os.write(1, b"after\\n")
os.write(2, b"error\\n")
"""


def run(wanted: bool, before: str = "") -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(wanted=wanted, before=before)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_nothing_gets_through_and_all_is_as_before() -> None:
    ended = run(True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "before\nafter\n", "error\n")


def test_only_if_wanted() -> None:
    assert run(False).stdout.count("lost") == 2


@pytest.mark.parametrize("number", [1, 2])
def test_a_closed_descriptor_is_no_error(number: int) -> None:
    ended = run(True, f"os.close({number}); os.write = lambda *_: 0; print = sys.stdout.write = lambda *_: 0")
    assert ended.returncode == 0, ended.stderr
