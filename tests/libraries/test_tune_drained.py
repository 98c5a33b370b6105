"""Ray Tune in a job that drains, on hpcray alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.environ.get("HPCRAY_TEST_ENGINE") == "ray", reason="Ray's jobs do not drain"),
]
PROGRAM = Path(__file__).parent / "programs" / "tune_drained.py"


def test_a_search_that_is_drained_is_saved_and_says_so(run: Callable[..., str], tmp_path: Path) -> None:
    def result() -> dict[str, object]:
        lines = run(PROGRAM, str(tmp_path)).splitlines()
        found: dict[str, object] = json.loads([line for line in lines if line.startswith("{")][-1])
        return found

    text = str(result()["drained"])
    found = re.match(r"(\d+) of \d+ trials have not ended: the job drains \(a test\)", text)
    assert found is not None and "Tuner.restore(" in text, text
    assert int(found[1]) >= 1
    assert result() == {"trials": 12, "errors": 0, "best": 11}
