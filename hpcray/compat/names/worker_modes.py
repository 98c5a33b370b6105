"""`ray.SCRIPT_MODE` and the like: what a process is to a job, and the languages of workers."""

from __future__ import annotations

import enum

SCRIPT_MODE, WORKER_MODE, LOCAL_MODE = 0, 1, 2


class Language(enum.Enum):
    """Languages of workers. Every worker of hpcray runs Python."""

    PYTHON = 0
    JAVA = 1
    CPP = 2
