"""The job of a driver: import path, working directory, variables and namespace of its workers.

The first driver, job 01000000, publishes this to the whole cluster. A later one gets the next number, and what its
tasks need travels as a field of its runtime environment: so its workers serve no other driver, as a worker serves one
environment for life.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from typing import Any

import msgspec

from hpcray.common.config import RAY_LIBRARIES
from hpcray.common.ids import job_id_of
from hpcray.common.job_names import DRIVER_PREFIX, JOB_ID_METADATA_KEY, KV_NAMESPACE, job_config, job_key, jobs_space
from hpcray.common.resources import JOB_FIELD
from hpcray.notebooks import notebook_shell
from hpcray.platform.log_format import FORMATTERS, STANDARD_ATTRIBUTES
from hpcray.platform.path_relocation import PathRelocation
from hpcray.platform.sockets import node_ip_address
from hpcray.protocol.messages import ATTACHED, WORKER, JobInfo
from hpcray.runtime.core_worker.core_worker import CoreWorker, current
from hpcray.runtime.worker.log_output import log_as

# ------------------------------------------------------------ submitted driver
# The driver of a submitted job, as the job knows it.


def report_to_submission(process: CoreWorker, job_id: str) -> None:
    """Store who the driver is of the submitted job whose entrypoint this process is, or was started by."""
    submission = (job_config(os.environ).get("metadata") or {}).get(JOB_ID_METADATA_KEY)
    if submission:
        driver = {"id": job_id, "node_ip_address": node_ip_address(), "pid": str(os.getpid())}
        packed = json.dumps(driver).encode()
        process.gcs.call("kv_put", job_key(DRIVER_PREFIX, submission), packed, True, KV_NAMESPACE)


# ------------------------------------------------------------ driver job


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
    moved = PathRelocation.of(os.environ)
    paths = [moved.original(os.path.abspath(path)) if path else os.getcwd() for path in sys.path]
    script = os.path.dirname(os.path.abspath(getattr(main, "__file__", None) or "."))
    if script in paths:  # not with `python -m package.module`: its modules are no top-level ones
        paths.insert(0, script)
    for path in [path for path in paths if not _is_text(path)]:
        paths.remove(path)
        logging.getLogger("hpcray").warning(
            "hpcray: workers cannot import from %a: its name is not UTF-8; hint: a link with another name", path
        )
    if libraries := os.environ.get(RAY_LIBRARIES):
        env = {RAY_LIBRARIES: libraries, **env}
    job = JobInfo(
        job_id_of(1),
        namespace or str(uuid.uuid4()),
        tuple(dict.fromkeys(paths)),
        os.getcwd() if _is_text(os.getcwd()) else "",
        tuple(sorted(env.items())),
        process.me if (process.config.log_to_driver if log_to_driver is None else log_to_driver) else b"",
        () if process.config.preload else imported_libraries(),
        notebook_shell() is not None,
        process.me if process.place.kind == ATTACHED else b"",
    )
    process.place.is_driver = True
    if process.place.job is None:
        # Before the question for the number: where the job goes on from a journal, the head answers it after this.
        process.set_job(job)
    number = _number(process)
    report_to_submission(process, job_id_of(number))
    if number == 1:
        return {}
    process.place.job = job = msgspec.structs.replace(job, job_id=job_id_of(number), preload=())
    return {JOB_FIELD: msgspec.to_builtins(job)}


def _is_text(path: str) -> bool:
    """Return True if a path can be sent: a name of a file is any bytes, of which Python makes what is no text."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


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
    job = process.place.job if process is not None else None
    if process is None or job is None or job.job_id != job_id_of(1) or process.place.kind == WORKER:
        return
    if "HPCRAY_PRELOAD" in os.environ or library in (*job.preload, *process.config.preload.split(",")):
        return
    process.set_job(msgspec.structs.replace(job, preload=(*job.preload, library)))


def _number(process: CoreWorker) -> int:
    """Return the number of this driver's job: the first free one of this run. Who the driver is stays known."""
    space, command = jobs_space(process.me), " ".join(sys.orig_argv)
    facts = json.dumps({"proc": process.me.hex(), "pid": os.getpid(), "ip": node_ip_address(), "command": command})

    def is_ours(number: int) -> bool:
        return bool(process.gcs.call("kv_put", str(number).encode(), facts.encode(), False, space))

    if is_ours(1):
        return 1
    return next(number for number in count(1 + len(process.gcs.call("kv_keys", b"", space))) if is_ours(number))


# ------------------------------------------------------------ logging config
# `LoggingConfig`: the log lines of a job.


@dataclass
class LoggingConfig:
    """Format and level of the root loggers of the driver and its workers, for `init(logging_config=...)`.

    Args:
        encoding: "TEXT", or "JSON" for one object per line. Both contain job, node, worker, task and actor.
        log_level: lowest level that is written, a level name of `logging`.
        additional_log_standard_attrs: further attributes of log records to write.

    Raises:
        ValueError: the encoding, the level or an attribute is unknown.
    """

    encoding: str = "TEXT"
    log_level: str = "INFO"
    additional_log_standard_attrs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.encoding not in FORMATTERS:
            raise ValueError(f"Invalid encoding type: {self.encoding}. Valid encoding types are: {list(FORMATTERS)}")
        level: Any = self.log_level
        if not isinstance(level, int) and not isinstance(logging.getLevelName(level), int):
            raise ValueError(f"Unknown level: {self.log_level!r}; hint: DEBUG, INFO, WARNING, ERROR or CRITICAL")
        for attribute in self.additional_log_standard_attrs:
            if attribute not in STANDARD_ATTRIBUTES:
                raise ValueError(
                    f"Unknown python logging standard attribute: {attribute}. The valid attributes are: "
                    f"{set(STANDARD_ATTRIBUTES)}"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict of JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> LoggingConfig:
        """Make one of a mapping of fields; what is no field is left out."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in d.items() if name in known})

    def _apply(self) -> None:
        """Configure the loggers of this process."""
        log_as(self.to_dict())

    _configure_logging = _apply
