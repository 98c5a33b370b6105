"""`init("slurm://JOBID")` and `init("ssh://HOST/JOBID")`: an attachment is made, and its near end is joined."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping

import msgspec

from hpcray.attach.carrier import JobPlace
from hpcray.attach.near_end import Attaching, Ready
from hpcray.platform.config_files import launch_config
from hpcray.platform.process_control import module_line

_JOB = re.compile(r"[\w.+-]*")
_HOST = re.compile(r"(?:[\w.+-]+@)?\[?[\w.:-]+\]?")
_lives: list[subprocess.Popen[bytes]] = []
"""The near ends of this program: each ends with its standard input."""


def attach(address: str, environ: Mapping[str, str]) -> str:
    """Attach to a job that runs elsewhere; return the session directory of the near end.

    Args:
        address: `slurm://JOBID`, `slurm://`, `ssh://HOST/JOBID` or `ssh://HOST`.

    Raises:
        ConnectionError: there is no such job, or no way to it. ValueError: the address is not valid.
    """
    return attach_to(parse_place(address, environ), environ)


def parse_place(address: str, environ: Mapping[str, str]) -> JobPlace:
    """Return what an address means.

    Raises:
        ValueError: it is not valid.
    """
    scheme, _, rest = address.partition("://")
    host, job = "", rest
    if scheme == "ssh":
        host, _, job = rest.partition("/")
    job = job.strip("/")
    if (
        (scheme == "ssh") != bool(host)
        or not _JOB.fullmatch(job)
        or (host and not _HOST.fullmatch(host))
        or (host.startswith("-") or job.startswith("-"))
    ):
        raise ValueError(
            f"address {address!r} is not valid; hint: slurm://JOBID, slurm:// (the only job), ssh://HOST/JOBID"
        )
    options: tuple[str, ...] = ()
    port = re.fullmatch(r"(.*[^:]):(\d+)", host)
    if port:
        host, options = port[1], ("-p", port[2])
    return JobPlace(address, host, job or "auto", launch_config(environ).attach_command, options)


def attach_to(place: JobPlace, environ: Mapping[str, str]) -> str:
    """Attach to a job. Arguments and errors: as for `attach`."""
    config = launch_config(environ)
    order = Attaching(place, config.attach_wait, config.attach_dir or tempfile.gettempdir())
    child = subprocess.Popen(
        module_line("hpcray.attach"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
    )
    assert child.stdin is not None and child.stdout is not None
    said = b""
    try:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(msgspec.json.encode(order) + b"\n")
        while not said.endswith(b"\n") and (more := child.stdout.read(1 << 16)):
            said += more
        ready = msgspec.json.decode(said, type=Ready) if said else Ready(error="the process that attaches has ended")
    except BaseException:
        child.stdin.close()
        child.wait()
        raise
    finally:
        child.stdout.close()
    if ready.error:
        child.stdin.close()
        child.wait()
        raise ConnectionError(ready.error)
    _lives.append(child)
    return ready.session_dir


def _forked() -> None:
    """A child that user code forked must not keep the near ends of its parent."""
    for child in _lives:
        if child.stdin is not None:
            with contextlib.suppress(OSError):
                os.close(child.stdin.fileno())
    _lives.clear()


os.register_at_fork(after_in_child=_forked)
