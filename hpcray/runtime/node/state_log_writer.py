"""The state log of the head: written to the journal for the job's next run, and to the standby (`head_failover`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping

import msgspec

from hpcray.common.config import Config
from hpcray.common.exceptions import StartupError
from hpcray.common.ids import NIL_PROC
from hpcray.core.gcs.gcs import Gcs
from hpcray.core.gcs.state_log import TableSnapshot, pieces
from hpcray.platform.allocation import job_to_ask
from hpcray.platform.journal_file import JournalFile
from hpcray.protocol.messages.nodes import RowChange
from hpcray.protocol.messages.processes import JobInfo, SetJob
from hpcray.runtime.raylet.raylet import Raylet

Sink = Callable[[list[RowChange], bool], None]
_MAX_LINES = 10
_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(list[RowChange])


class StateLogWriter:
    """Reads the rows that have changed, once per turn of the head's raylet, and writes them.

    Attributes:
        sinks: each is called with changes, and with whether they are all rows, as they are the first time.
        files: rewritten when they have become long.
    """

    def __init__(self, raylet: Raylet, head: Gcs, is_up: Callable[[], bool]) -> None:
        self.sinks: list[Sink] = []
        self.files: list[JournalFile] = []
        self._raylet = raylet
        self._log = head.log
        self._head = head
        self._is_up = is_up
        self._begun = self._resumed_logged = False
        raylet.loop.each_turn.append(self._turn)

    def write_all(self) -> None:
        """Write all rows, at the end of this turn: there is a new reader."""
        self._begun = False

    def _turn(self) -> None:
        if not self._begun:
            if not self._is_up():
                return
            self._begun = True
            self._write(self._log.snapshot_rows(), True)
            if not self._resumed_logged:
                self._resumed_logged = True
                log_resumed(self._raylet, self._head)
        elif self._log.dirty_rows:
            self._write(self._log.changed_rows(), False)
            if self._log.is_long and self.files:
                for file in self.files:
                    file.rewrite(_records(self._log.snapshot_rows()))

    def _write(self, rows: list[RowChange], whole: bool) -> None:
        for sink in self.sinks:
            sink(rows, whole)
        for file in self.files:
            if whole:
                file.rewrite(_records(rows))
            else:
                file.append(_encode(rows))


def open_journal(config: Config, environ: Mapping[str, str], warn: Callable[[str], None]) -> JournalFile | None:
    """Open the journal on disk that the settings name; None without one.

    Raises:
        StartupError: it cannot be used.
    """
    if not config.journal_dir:
        return None
    job = job_to_ask(environ)
    if "%j" in config.journal_dir and not job:
        raise StartupError(f"HPCRAY_JOURNAL_DIR={config.journal_dir}: this is no Slurm job, so there is no %j")
    return JournalFile(config.journal_dir.replace("%j", job), warn)


def check_journal(config: Config, environ: MutableMapping[str, str], rank: int) -> None:
    """Check, before other ranks wait for this one, that the journal can be opened and read.

    Raises:
        StartupError: the journal cannot be used.
    """
    file = open_journal(config, environ, lambda text: None) if rank == 0 else None
    if file is not None:
        try:
            read_back(file)
        finally:
            file.close()


def read_back(file: JournalFile) -> TableSnapshot | None:
    """Return the rows of an earlier run; None where there was none. A trial GCS has restored them all.

    Raises:
        StartupError: the file is no journal of this version.
    """
    replica, trial = TableSnapshot(), Gcs(Config())
    try:
        for record in file.read():
            replica.apply(_decoder.decode(record))
        trial.begin_run(0, replica)
        trial.handle(0.0, NIL_PROC, SetJob(JobInfo("", "", (), "")))
    except (msgspec.DecodeError, LookupError, ValueError, TypeError, OverflowError) as error:
        raise StartupError(
            f"the journal in {file.path} is damaged, or of another version of hpcray "
            f"({type(error).__name__}: {error}); hint: remove it"
        ) from None
    return replica if replica.rows else None


def _records(rows: list[RowChange]) -> list[bytes]:
    return [_encode(piece) for piece in pieces(rows)]


def log_resumed(raylet: Raylet, head: Gcs) -> None:
    """Print what came back from an earlier run, and what did not."""
    found = head.resumed
    if found is None:
        return
    raylet.log(
        f"from the journal of an earlier run: {found.actors} detached actors, {found.groups} detached placement "
        f"groups, {found.values} values"
    )
    for text in found.lost[:_MAX_LINES]:
        raylet.log(f"not brought back: {text}")
    if len(found.lost) > _MAX_LINES:
        raylet.log(f"nor {len(found.lost) - _MAX_LINES} more")
