"""The log files of workers: their names, and the lines in them that say who writes what follows."""

from __future__ import annotations

LOG_PREFIX_ACTOR_NAME = ":actor_name:"
LOG_PREFIX_TASK_NAME = ":task_name:"
LOG_PREFIX_TASK_ID = ":task_id:"
LOG_PREFIX_JOB_ID = ":job_id:"
LOG_PREFIX_INFO_MESSAGE = ":info_message:"
FIRST_JOB = "01000000"
LOG_PIECE = 256 << 10
"""Bytes of a log file that a raylet reads for one question."""
_WORKER = "worker"


def logs_directory(session_dir: str) -> str:
    """Return the directory of the log files of a node."""
    return f"{session_dir}/logs"


def worker_log_name(proc: bytes, job: str, pid: int) -> str:
    """Return the name of a worker's log files, without `.out` or `.err`."""
    return f"{_WORKER}-{proc.hex()}-{job}-{pid}"


def split_rotation(name: str) -> tuple[str, int]:
    """Return the name of a log file before it was rotated away, and how often since; 0: it is the present one."""
    stem, _, number = name.rpartition(".")
    return (stem, int(number)) if stem and number.isdecimal() else (name, 0)


def parse_worker_log_name(name: str) -> tuple[bytes, int, bool] | None:
    """Return the worker's proc id, its pid, and whether the file has its standard error; None for another file."""
    stem, _, kind = name.rpartition(".")
    parts = stem.split("-")
    if kind not in ("out", "err") or len(parts) != 4 or parts[0] != _WORKER:
        return None
    try:
        return bytes.fromhex(parts[1]), int(parts[3]), kind == "err"
    except ValueError:
        return None
