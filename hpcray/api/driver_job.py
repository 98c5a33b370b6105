"""The job of a driver: import path, working directory, variables and namespace of its workers.

The first driver, job 01000000, publishes this to the whole cluster. A later one gets the next number, and what its
tasks need travels as a field of its runtime environment: so its workers serve no other driver, as a worker serves one
environment for life.
"""

from __future__ import annotations

import os
import re
import sys
import uuid
from itertools import count

import msgspec

from hpcray.api.submitted_driver import report_to_submission
from hpcray.common.config import RAY_LIBRARIES
from hpcray.common.ids import run_of
from hpcray.common.resources import JOB_FIELD
from hpcray.notebooks.notebook import notebook_shell
from hpcray.platform.path_relocation import PathRelocation
from hpcray.protocol.messages import WORKER, JobInfo
from hpcray.runtime.core_worker.core_worker import CoreWorker, current

LIBRARY = re.compile(r"ray\.(data|train|tune|serve|rllib)(\.[a-z]\w*)?")
"""The public modules of Ray's libraries."""


def announce(
    process: CoreWorker, namespace: str | None, env: dict[str, str], log_to_driver: bool | None
) -> dict[str, object]:
    """Make this driver a job.

    Args:
        namespace: of named actors; None for a new one.
        env: variables of the job's workers.
        log_to_driver: whether this driver shows what its workers print; None for what the setting says.

    Returns:
        Fields for the job's runtime environment.
    """
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    paths = [os.path.dirname(os.path.abspath(script))] if script else []
    moved = PathRelocation.of(os.environ)
    paths += [moved.original(os.path.abspath(path)) if path else os.getcwd() for path in sys.path]
    if libraries := os.environ.get(RAY_LIBRARIES):
        env = {RAY_LIBRARIES: libraries, **env}
    job = JobInfo(
        _id_of(1),
        namespace or str(uuid.uuid4()),
        tuple(dict.fromkeys(paths)),
        os.getcwd(),
        tuple(sorted(env.items())),
        process.me if (process.config.log_to_driver if log_to_driver is None else log_to_driver) else b"",
        () if process.config.preload else imported_libraries(),
        notebook_shell() is not None,
    )
    process.is_driver = True
    if process.job is None:
        # Before the question for the number: where the job goes on from a journal, the head answers it after this.
        process.set_job(job)
    number = _number(process)
    report_to_submission(process, _id_of(number))
    if number == 1:
        return {}
    process.job = job = msgspec.structs.replace(job, job_id=_id_of(number), preload=())
    return {JOB_FIELD: msgspec.to_builtins(job)}


def imported_libraries() -> tuple[str, ...]:
    """Return the modules of Ray's libraries that this program has imported so far, to be preloaded by its nodes.

    HPCRAY_PRELOAD, where it is set, says what is preloaded instead.
    """
    if not os.environ.get(RAY_LIBRARIES) or "HPCRAY_PRELOAD" in os.environ:
        return ()
    return tuple(name for name in sys.modules if LIBRARY.fullmatch(name))


def preload(library: str) -> None:
    """Have the nodes preload a library of Ray that this program, the first driver, begins to import after `init`."""
    process = current.process
    if process is None or process.job is None or process.job.job_id != _id_of(1) or process.kind == WORKER:
        return
    if "HPCRAY_PRELOAD" in os.environ or library in (*process.job.preload, *process.config.preload.split(",")):
        return
    process.set_job(msgspec.structs.replace(process.job, preload=(*process.job.preload, library)))


def _id_of(number: int) -> str:
    return number.to_bytes(4, "little").hex()


def _number(process: CoreWorker) -> int:
    """Return the number of this driver's job: the first free one of this run."""
    space = f"hpcray.jobs.{run_of(process.me)}"

    def is_ours(number: int) -> bool:
        return bool(process.gcs.call("kv_put", str(number).encode(), process.me, False, space))

    if is_ours(1):
        return 1
    return next(number for number in count(1 + len(process.gcs.call("kv_keys", b"", space))) if is_ours(number))
