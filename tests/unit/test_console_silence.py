"""Standard output and error, silenced for the libraries at exit."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """\
import os, sys
from hpcray.platform.console import silenced_output
{before}
print("before")
with silenced_output({wanted}):
    print("lost"); sys.stdout.flush()
    os.write(1, b"lost\\n"); os.write(2, b"lost\\n")
os.write(1, b"after\\n")
os.write(2, b"error\\n")
"""


def run(wanted: bool, before: str = "") -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(wanted=wanted, before=before)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_silenced_output_discards_everything_and_restores_the_descriptors() -> None:
    ended = run(True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "before\nafter\n", "error\n")


def test_output_is_not_silenced_unless_requested() -> None:
    assert run(False).stdout.count("lost") == 2


@pytest.mark.parametrize("number", [1, 2])
def test_a_closed_descriptor_can_be_silenced(number: int) -> None:
    ended = run(True, f"os.close({number}); os.write = lambda *_: 0; print = sys.stdout.write = lambda *_: 0")
    assert ended.returncode == 0, ended.stderr
