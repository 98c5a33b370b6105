"""Jobs on this host that a driver joins as if it were elsewhere: through a bridge, and one pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import TracebackType
from typing import Any

from hpcray.attach.carrier import JobPlace
from hpcray.attach.client import attach_to

_PROGRAM = """
import json, sys
import hpcray
context = hpcray.init(include_dashboard=False, log_to_driver=False, **json.loads(sys.argv[1]))
print(context.address_info["session_dir"], flush=True)
sys.stdin.read()
"""
OF_DRIVERS = ("namespace", "runtime_env", "log_to_driver", "logging_config", "job_config", "ignore_reinit_error")
"""Arguments of `init` that are of a driver, not of the job that it joins."""
BRIDGE = (sys.executable, "-P", "-m", "hpcray.cli", "bridge")


class JobElsewhere:
    """A context manager: a job of one node, and the way to it. options: of its `init`."""

    def __init__(self, **options: Any) -> None:
        line = [sys.executable, "-c", _PROGRAM, json.dumps(options)]
        self.program = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.program.stdout is not None
        self.session_dir = self.program.stdout.readline().strip()
        assert self.session_dir, "the job has not started"

    def place(self, *bridge: str) -> JobPlace:
        """Return the way to it. bridge: what is run as the bridge."""
        return JobPlace("pipe://here", job="", session=self.session_dir, bridge=bridge or BRIDGE)

    def attach(self, **variables: str) -> str:
        """Attach; return the session directory of the near end."""
        return attach_to(self.place(), {**os.environ, **variables})

    def end(self) -> None:
        """End the job."""
        if self.program.stdin is not None:
            self.program.stdin.close()
        self.program.wait(30)
        if self.program.stdout is not None:
            self.program.stdout.close()

    def __enter__(self) -> JobElsewhere:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
