"""A look at a running job from outside: join it, ask, leave. The job takes no notice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hpcray.runtime.bootstrap import enter
from hpcray.runtime.options import NodeOptions
from hpcray.runtime.process import Process, connect
from hpcray.runtime.refs import current


@contextlib.contextmanager
def attached(address: str = "auto") -> Iterator[Process]:
    """A process of the job that runs on this machine; in a program that takes part in it, that program itself.

    Args:
        address: "auto" (the newest job of this user on this machine), or the session directory of one of its nodes.

    Raises:
        ConnectionError: there is no such job. ValueError: the address is not valid.
    """
    if current.process is not None and current.process.dead is None:
        yield current.process
        return
    process = connect(enter(address, NodeOptions()).session_dir, "attached")
    current.process = process
    try:
        process.start()
        yield process
    finally:
        process.close()
