"""`hpcray-launch` ends a launcher that goes on after rank 0 has left: Slurm may be waiting for a node that is lost."""

from __future__ import annotations

import sys

import pytest
from helpers.jobs import ROOT

from hpcray.launch import runner

# A launcher whose rank 0 tells its exit code at once, while another rank never ends.
LATE = """\
import signal, subprocess, sys, time
{ignore}
rank0 = "import sys; sys.path.insert(0, sys.argv[1]); from hpcray.platform.console import adopt_console; "
rank0 += "adopt_console(True).leave(5)"
subprocess.run([sys.executable, "-c", rank0, sys.argv[1]], check=True)
time.sleep(600)
"""


@pytest.mark.parametrize("ignore", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"], ids=["polite", "stubborn"])
def test_a_launcher_that_waits_for_a_lost_rank_is_ended(monkeypatch: pytest.MonkeyPatch, ignore: str) -> None:
    monkeypatch.setattr(runner, "_OTHER_RANKS_EXIT_TIMEOUT", 0.2)
    monkeypatch.setattr(runner, "_SIGKILL_DELAY", 0.2)
    code = runner.run_launcher([sys.executable, "-c", LATE.format(ignore=ignore), str(ROOT)], console=True)
    assert code == 5, "what rank 0 told"
