"""The session directory of a running node, made again where a cleaner of temporary files removes it, or some of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

from hpcray.platform.fork_server import ForkServerClient
from hpcray.platform.session_directory import SessionDirectory, SessionError
from hpcray.runtime.raylet.event_loop import EventLoop
from hpcray.runtime.raylet.log_monitor import LogMonitor

_PERIOD, _SLACK = 1.0, 0.5
"""Seconds between two looks, and how much later one may come."""
_REPORT_INTERVAL = 60.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_HINT = "hint: HPCRAY_TMPDIR names a directory that nothing cleans"


class SessionWatch:
    """Looks for what was removed: now and then, and before a worker is forked, which needs all of it.

    Sockets of other processes are not made again: who finds none writes through the raylet.

    Args:
        copies: directories in the session directory that workers import from, and that cannot be made again.
        log: writes a line about this node.
        give_up: ends this node, with the reason.
        ending: whether the node ends, and its directory with it.
    """

    def __init__(
        self,
        loop: EventLoop,
        session: SessionDirectory,
        template: ForkServerClient,
        logs: LogMonitor,
        copies: Sequence[str],
        log: Callable[[str], None],
        give_up: Callable[[str], None],
        ending: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._session = session
        self._template = template
        self._logs = logs
        self._copies = copies
        self._log = log
        self._give_up = give_up
        self._reported_at = -_REPORT_INTERVAL
        self._ending = ending
        loop.call_at(loop.now + _PERIOD, self._look, _SLACK)

    def _look(self) -> None:
        if not self._ending():
            self.check()
            self._loop.call_at(self._loop.now + _PERIOD, self._look, _SLACK)

    def check(self) -> None:
        """Make again what is missing; end the node where that cannot be done."""
        missing = self._session.missing()
        try:
            if missing:
                self._restore(missing)
            elif self._logs.restore():
                missing = [f"{self._session.path}/logs"]
        except (OSError, SessionError) as error:
            what = missing[0] if missing else f"{self._session.path}/logs"
            if getattr(error, "errno", 0) in _FULL:
                self._report(f"{what} was removed, and cannot be made again yet: {error}; hint: make room there")
                return
            self._give_up(f"{what} was removed, and cannot be made again, so this node ends: {error}; {_HINT}")
            return
        if missing:
            self._report(f"{missing[0]} was removed while the job runs, and is made again; {_HINT}")

    def _restore(self, missing: Sequence[str]) -> None:
        if gone := next((path for path in self._copies if not os.path.isdir(path)), ""):
            raise SessionError(f"{gone} was a copy that workers import from")
        self._session.restore()
        self._template.lock_session()
        if not os.path.lexists(path := self._session.socket_path(0)):
            self._loop.listen_at(path)
        self._logs.restore()

    def _report(self, text: str) -> None:
        if self._loop.now - self._reported_at >= _REPORT_INTERVAL:
            self._reported_at = self._loop.now
            self._log(text)
