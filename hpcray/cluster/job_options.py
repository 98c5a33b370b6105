"""What a submitted job asks for, checked: times, sizes, counts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from hpcray.base.job_errors import SubmitError
from hpcray.cluster.options import parse_size

Time = str | int | float | timedelta
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")
_TIME_HINT = "hint: minutes, 'hours:minutes:seconds', 'days-hours:minutes' as in sbatch, or a timedelta"
_LONGEST_NOTICE = 60
_REQUEUES = 3


@dataclass(frozen=True)
class JobRequest:
    """Options of one job; sizes in bytes, times in seconds, each None where the site's default shall hold.

    Attributes:
        name: shown by `hpcray jobs` and squeue.
        nodes: number of hpcray nodes.
        gpus_per_node, cpus_per_node, mem: of each node.
        time: limit of the whole job.
        partition: Slurm's partition, or "".
        requeues: how often the job may start again after its time limit.
        env: variables of the job.
        sbatch: further options of sbatch, by their long names.
    """

    name: str
    nodes: int = 1
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    mem: int | None = None
    time: int | None = None
    partition: str = ""
    requeues: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    sbatch: Mapping[str, str | bool] = field(default_factory=dict)

    @property
    def notice(self) -> int:
        """Seconds before the time limit at which the job is told that it must end."""
        return 0 if self.time is None else min(_LONGEST_NOTICE, max(1, self.time // 3))


def check_request(
    name: str,
    nodes: int,
    gpus_per_node: int | None,
    cpus_per_node: int | None,
    mem: str | int | None,
    time: Time | None,
    partition: str | None,
    requeue: bool | int,
    env: Mapping[str, str] | None,
    sbatch: Mapping[str, str | bool] | None,
) -> JobRequest:
    """The options as a request.

    Raises:
        SubmitError: one of them is not valid; the message names it.
    """
    for label, value in {**(env or {})}.items():
        if not isinstance(label, str) or not isinstance(value, str) or "=" in label or not label:
            raise SubmitError(f"env: {label!r}: {value!r} is no variable; hint: names and values are strings")
    return JobRequest(
        name=name,
        nodes=_count("nodes", nodes, 1),
        gpus_per_node=None if gpus_per_node is None else _count("gpus_per_node", gpus_per_node, 0),
        cpus_per_node=None if cpus_per_node is None else _count("cpus_per_node", cpus_per_node, 1),
        mem=None if mem is None else _bytes(mem),
        time=None if time is None else parse_time(time),
        partition=partition or "",
        requeues=_REQUEUES if requeue is True else _count("requeue", int(requeue), 0),
        env=dict(env or {}),
        sbatch={option.lstrip("-").replace("_", "-"): value for option, value in (sbatch or {}).items()},
    )


def parse_time(given: Time) -> int:
    """Seconds of a time limit, at least 1.

    Args:
        given: minutes as a number; a `timedelta`; or one of sbatch's forms: minutes, minutes:seconds,
            hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds.

    Raises:
        SubmitError: it is none of them, or not positive.
    """
    seconds = math.nan
    if isinstance(given, timedelta):
        seconds = given.total_seconds()
    elif isinstance(given, str):
        seconds = _sbatch_time(given.strip())
    elif isinstance(given, int | float) and not isinstance(given, bool):
        seconds = given * 60.0
    if not (0 < seconds < math.inf):
        raise SubmitError(f"time={given!r} is not a time limit; {_TIME_HINT}")
    return math.ceil(seconds)


def _sbatch_time(text: str) -> float:
    found = _TIME.fullmatch(text)
    if found is None:
        return math.nan
    days, parts = found["days"], [int(part) for part in (found["a"], found["b"], found["c"]) if part is not None]
    if days is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return int(days) * 86400.0 + hours * 3600 + minutes * 60 + seconds
    if len(parts) == 3:
        return parts[0] * 3600.0 + parts[1] * 60 + parts[2]
    return parts[0] * 60.0 + (parts[1] if len(parts) == 2 else 0)


def _bytes(given: str | int) -> int:
    try:
        return parse_size(str(given))
    except ValueError as error:
        raise SubmitError(f"mem: {error}") from None


def _count(name: str, value: int, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SubmitError(f"{name}={value!r} is not a whole number of at least {least}")
    return value
