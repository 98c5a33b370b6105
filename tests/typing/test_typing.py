"""mypy accepts what is right, infers what it should, and refuses what is wrong, line by line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.slow  # mypy reads all of hpcray: half a minute, without its cache
@pytest.mark.timeout(300)
def test_mypy_accepts_right_programs_and_rejects_wrong_ones(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context"]
    command += ["--cache-dir", str(tmp_path), str(HERE / "right.py"), str(HERE / "wrong.py")]
    env = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=280)
    said = re.findall(r"^(.*?):(\d+): error: .*\[([a-z-]+)\]$", done.stdout, re.MULTILINE)
    ours = Path("tests/typing")
    found = {(Path(path).name, int(line), code) for path, line, code in said if Path(path).parent == ours}
    wanted = {
        ("wrong.py", number, mark.group(1))
        for number, line in enumerate((HERE / "wrong.py").read_text().splitlines(), 1)
        if (mark := re.search(r"# error: ([a-z-]+)$", line))
    }
    assert len(wanted) > 5
    assert found == wanted, done.stdout + done.stderr
