"""The head's journal and who keeps it: the file of the job's next run, and the standby (`runtime.standby`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING

import msgspec

from hpcray.base.config import Config
from hpcray.base.failures import StartupError
from hpcray.base.ids import NIL_PROC
from hpcray.core.gcs.head import HeadCore
from hpcray.core.gcs.journal import Replica, pieces
from hpcray.host.allocation import job_to_ask
from hpcray.host.journal_file import JournalFile
from hpcray.wire.messages.processes import JobInfo, SetJob
from hpcray.wire.messages.succession import Change

if TYPE_CHECKING:
    from hpcray.runtime.raylet import Raylet

Sink = Callable[[list[Change], bool], None]
_LINES = 10
_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(list[Change])


class Journaling:
    """Reads the rows that have changed, once per turn of the head's raylet, and hands them on.

    Attributes:
        sinks: each is given changes, and whether they are all rows, which they are the first time.
        files: they are written anew when they have become long.
    """

    def __init__(self, raylet: Raylet, head: HeadCore, is_up: Callable[[], bool]) -> None:
        self.sinks: list[Sink] = []
        self.files: list[JournalFile] = []
        self._raylet = raylet
        self._journal = head.journal
        self._head = head
        self._is_up = is_up
        self._begun = False
        raylet.loop.each_turn.append(self._turn)

    def _turn(self) -> None:
        if not self._begun:
            if not self._is_up():
                return
            self._begun = True
            self._hand_on(self._journal.begin(), True)
            tell_resumed(self._raylet, self._head)
        elif self._journal.notes:
            self._hand_on(self._journal.changes(), False)
            if self._journal.long and self.files:
                for file in self.files:
                    file.rewrite(_records(self._journal.begin()))

    def _hand_on(self, rows: list[Change], whole: bool) -> None:
        for sink in self.sinks:
            sink(rows, whole)
        for file in self.files:
            if whole:
                file.rewrite(_records(rows))
            else:
                file.append(_encode(rows))


def open_journal(config: Config, environ: Mapping[str, str], warn: Callable[[str], None]) -> JournalFile | None:
    """The journal on disk that the settings ask for.

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
    """Before other ranks wait for this one: whether there may be a journal, and what there is can be read. What this
    job starts itself (`init(address="local")` in a task) has no part in it.

    Raises:
        StartupError: no.
    """
    file = open_journal(config, environ, lambda text: None) if rank == 0 else None
    environ.pop("HPCRAY_JOURNAL_DIR", None)
    if file is not None:
        try:
            read_back(file)
        finally:
            file.close()


def read_back(file: JournalFile) -> Replica | None:
    """The rows of an earlier run; None where there was none. A head that is not used has understood them all.

    Raises:
        StartupError: what is there is no journal of ours.
    """
    replica, trial = Replica(), HeadCore(Config())
    try:
        for record in file.read():
            replica.take(_decoder.decode(record))
        trial.earlier = replica
        trial.handle(0.0, NIL_PROC, SetJob(JobInfo("", "", (), "")))
    except (msgspec.DecodeError, LookupError, ValueError, TypeError, OverflowError) as error:
        raise StartupError(
            f"the journal in {file.path} is damaged, or of another version of hpcray "
            f"({type(error).__name__}: {error}); hint: remove it"
        ) from None
    return replica if replica.rows else None


def _records(rows: list[Change]) -> list[bytes]:
    return [_encode(piece) for piece in pieces(rows)]


def tell_resumed(raylet: Raylet, head: HeadCore) -> None:
    """What came back from an earlier run, and what did not."""
    found = head.resumed
    if found is None:
        return
    raylet.say(
        f"from the journal of an earlier run: {found.actors} detached actors, {found.groups} detached placement "
        f"groups, {found.values} values"
    )
    for text in found.lost[:_LINES]:
        raylet.say(f"not brought back: {text}")
    if len(found.lost) > _LINES:
        raylet.say(f"nor {len(found.lost) - _LINES} more")
