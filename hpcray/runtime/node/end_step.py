"""Ends the other ranks of a step when this one cannot start: they would wait for it in `MPI_Init`."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from hpcray.common.exceptions import StartupError
from hpcray.platform.process_control import LAUNCHER_NAME
from hpcray.transport.startup import Launch

_SCANCEL_TIME = 10.0
_DAMPING, _LONGEST_DAMPING = 0.01, 3.0


def reported_by_launcher(error: StartupError, launch: Launch) -> StartupError:
    """End the other ranks for this reason that this one does not start (`end_step`). Returns the error to raise."""
    return StartupError(str(error), reported_by="launcher") if end_step(launch, error) else error


def end_step(launch: Launch, error: Exception, environ: Mapping[str, str] | None = None) -> bool:
    """Print why this rank cannot start, and end the others, which would wait for it in `MPI_Init`: by Slurm, or by an
    mpirun that runs with `--enable-recovery`. (Any other mpirun ends all ranks by itself when one fails.)

    Returns:
        Whether the reason was printed; if Slurm does not end the others, their start times out.
    """
    environ = os.environ if environ is None else environ
    launcher = _patient_mpirun() if launch.kind == "mpirun" else 0
    if (launch.kind != "srun" and not launcher) or launch.size == 1:
        return False
    where = f"rank {launch.rank} on {socket.gethostname()}"
    print(f"hpcray: {where} does not start, and so the job does not: {error}", file=sys.stderr, flush=True)
    if launcher:
        with contextlib.suppress(OSError):
            os.kill(launcher, signal.SIGTERM)
        return True
    # Many ranks may fail alike: the first scancel ends the others before they run theirs.
    time.sleep(random.uniform(0, min(_DAMPING * launch.rank, _LONGEST_DAMPING)))
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        step = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
        # SIGTERM lets them tidy up. Without --signal, scancel kills the tasks of a step at once.
        line = ["scancel", "--signal=TERM", step]
        subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SCANCEL_TIME)
    return True


def _patient_mpirun() -> int:
    """Return the pid of the parent if it is an mpirun that survives a rank's death, or its daemon here, or
    `hpcray.launch.local_ranks`; else 0."""
    parent = os.getppid()
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{parent}/cmdline").read_bytes()
        if (
            Path(f"/proc/{parent}/comm").read_text() == f"{LAUNCHER_NAME}\n"
            or b"--enable-recovery" in line
            or b"/prted\0" in line
        ):
            return parent
    return 0
