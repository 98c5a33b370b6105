"""The batch process of a submitted job in PBS or Flux: `python -m hpcray.jobs.batch_job FOLDER`. Under Slurm submitit
does this.

It runs the `BatchLaunch` that the submission has left in the job's folder, and leaves its outcome there, as submitit
would: the files are named `batch` instead of the job's id, which the submission does not know.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from hpcray.jobs import read_pickle, write_pickle
from hpcray.platform.private_files import append_private_file

STEM = "batch"
"""Name of the job in the names of its files."""
LAUNCH = "launch.pkl"
SCRIPT_OUTPUT = "script.out"
"""File of the output of the batch script itself: why Python did not start."""


def main(folder: Path) -> int:
    """Run the job. Returns its exit code."""
    for fd, stream in ((1, "out"), (2, "err")):
        log = append_private_file(str(folder / f"{STEM}_0_log.{stream}"))
        os.dup2(log, fd)
        os.close(log)
    os.environ["SUBMITIT_FOLDER"] = str(folder)
    result = folder / f"{STEM}_0_result.pkl"
    try:
        outcome = read_pickle(folder / LAUNCH)()
    except Exception:
        traceback.print_exc()
        write_pickle(result, ("error", traceback.format_exc()))
        return 1
    write_pickle(result, ("success", outcome))
    return 0 if outcome.ok else outcome.code or 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
