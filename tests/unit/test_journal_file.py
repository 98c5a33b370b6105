"""The journal on disk: what was written is read back, and nothing that another user could have written is."""

from __future__ import annotations

import os
import re
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcray.common.exceptions import StartupError
from hpcray.core.gcs import state_log
from hpcray.platform import journal_file
from hpcray.platform.journal_file import JournalFile, pack_record, split_records
from hpcray.protocol.messages.nodes import RowChange
from hpcray.runtime.node.head_failover import read_back


def quiet(text: str) -> None:
    raise AssertionError(text)


def write(path: Path, *records: tuple[bytes, bool]) -> None:
    file = JournalFile(str(path), quiet)
    for record, whole in records:
        if whole:
            file.rewrite([record])
        else:
            file.append(record)
    file.close()


def crc(record: bytes) -> bytes:
    return zlib.crc32(record).to_bytes(4, "little")


def read(path: Path) -> list[bytes]:
    file = JournalFile(str(path), quiet)
    try:
        return file.read()
    finally:
        file.close()


@settings(max_examples=40)
@given(st.lists(st.tuples(st.binary(min_size=1, max_size=200), st.booleans()), max_size=12), st.data())
def test_a_prefix_of_the_records_survives_a_cut_at_any_byte(
    records: list[tuple[bytes, bool]], data: st.DataObject
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "j"
        write(path, (b"all", True), *records)
        latest = max((place for place, (_, whole) in enumerate(records) if whole), default=-1)
        wanted = [record for record, _ in records[max(latest, 0) :]]
        wanted = wanted if latest >= 0 else [b"all", *wanted]
        assert read(path) == wanted
        file = path / "journal"
        whole = file.read_bytes()
        file.write_bytes(whole[: data.draw(st.integers(len(b"hpcray-journal 1\n"), len(whole)))])
        found = read(path)
        assert found == wanted[: len(found)]


def damage(path: Path, change: Callable[[bytes], bytes]) -> tuple[list[bytes], list[str]]:
    """What is read of a damaged journal, and what is said of it."""
    file, said = path / "journal", list[str]()
    file.write_bytes(change(file.read_bytes()))
    journal = JournalFile(str(path), said.append)
    try:
        return journal.read(), said
    finally:
        journal.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b"two", b"tvo"),
        lambda data: data.replace(b"\3\0\0\0" + crc(b"two"), b"\xff\xff\xff\x7f" + crc(b"two")),
        lambda data: data.replace(b"\3\0\0\0" + crc(b"two"), b"\4\0\0\0" + crc(b"two")),
        lambda data: data.replace(b"\3\0\0\0" + crc(b"two"), bytes(8)),
        lambda data: data.replace(b"two", b"t"),
        lambda data: data.replace(b"two", b"one and two"),
    ],
)
def test_records_after_damage_are_not_read_and_the_damage_is_reported(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "j"
    write(path, (b"one", True), (b"two", False), (b"three", False), (b"four", False))
    found, said = damage(path, change)
    assert found == [b"one"]
    (text,) = said
    size = (path / "journal").stat().st_size
    at = len(b"hpcray-journal 1\n") + 8 + len(b"one")
    assert f"{path}/journal is damaged at byte {at}: its last {size - at} bytes" in text
    assert re.search(r"with (at least )?[12] whole records? in them", text) and "the record before" in text
    assert text.endswith(f"hint: look at its file system; what was there stays as {path}/journal.damaged")
    file = JournalFile(str(path), quiet)
    file.rewrite([b"new"])
    file.close()
    assert read(path) == [b"new"]
    assert b"four" in (path / "journal.damaged").read_bytes(), "it is kept for whoever wants to look"


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-3],
        lambda data: data[:-10],
        lambda data: data[:-4] + bytes(4),
        lambda data: data + bytes(8192),
        lambda data: data[:-12] + bytes(12),
        lambda data: data[:-3] + bytes(4096),
    ],
)
def test_a_record_that_was_cut_off_is_dropped_silently(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "j"
    write(path, (b"one", True), (b"two", False), (b"four", False))
    found, said = damage(path, change)
    assert found[:2] == [b"one", b"two"] and not said
    assert not (path / "journal.damaged").exists()


def test_a_journal_damaged_in_its_first_record_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "j"
    write(path, (b"one", True), (b"two", False))
    with pytest.raises(StartupError, match=rf"{path}/journal is damaged from its first record on .*hint: remove it"):
        damage(path, lambda data: data.replace(b"one", b"own"))


@settings(max_examples=200)
@given(st.lists(st.binary(min_size=1, max_size=60), min_size=2, max_size=12), st.data())
def test_damage_before_the_last_record_is_reported(records: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(map(pack_record, records))
    flipped = bytearray(whole)
    flipped[data.draw(st.integers(0, len(whole) - len(pack_record(records[-1])) - 1))] ^= data.draw(st.integers(1, 255))
    found, damaged = split_records(bytes(flipped), 0)
    assert found == records[: len(found)] and len(found) < len(records)
    assert damaged is not None
    assert damaged.at == sum(len(pack_record(record)) for record in found)
    assert damaged.size == len(whole) - damaged.at
    assert 1 <= damaged.records <= len(records) - len(found)


def test_the_search_for_records_after_damage_is_bounded_in_time() -> None:
    """A large value that was cut off, which looks like lengths everywhere."""
    value = b"".join(number.to_bytes(8, "little") for number in range(1 << 17))
    assert split_records(pack_record(b"one") + pack_record(value)[:-1], 0) == ([b"one"], None)


def test_the_next_run_reads_what_the_last_one_wrote(tmp_path: Path) -> None:
    path = tmp_path / "new" / "j"
    assert read(path) == []
    write(path, (b"one", True))
    file = JournalFile(str(path), quiet)
    assert file.read() == [b"one"]
    file.rewrite([b"two", b"more"])
    file.append(b"three")
    file.close()
    assert read(path) == [b"two", b"more", b"three"]
    assert path.stat().st_mode & 0o777 == 0o700
    assert {entry.name: entry.stat().st_mode & 0o777 for entry in path.iterdir()} == {"journal": 0o600, "lock": 0o600}


def test_a_finished_job_removes_its_journal(tmp_path: Path) -> None:
    path = tmp_path / "j"
    write(path, (b"one", True))
    file = JournalFile(str(path), quiet)
    file.append(b"not kept")
    file.close(remove=True)
    assert read(path) == []


def test_a_second_job_is_refused_a_journal_in_use(tmp_path: Path) -> None:
    first = JournalFile(str(tmp_path / "j"), quiet)
    with pytest.raises(StartupError, match=r"in use by another job; hint: one directory per job"):
        JournalFile(str(tmp_path / "j"), quiet)
    first.close()
    JournalFile(str(tmp_path / "j"), quiet).close()


@pytest.mark.parametrize("name", ["", "journal"])
def test_a_journal_that_other_users_can_open_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "j"
    write(path, (b"one", True))
    (path / name).chmod(0o750 if not name else 0o640)
    with pytest.raises(StartupError, match="open to other users .*hint: chmod"):
        read(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["", "journal"])
def test_a_journal_of_another_user_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "j"
    write(path, (b"one", True))
    os.chown(path / name, 65534, -1)
    with pytest.raises(StartupError, match="belongs to uid 65534"):
        read(path)


def test_a_journal_that_is_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    write(path, (b"one", True))
    (path / "journal").rename(tmp_path / "elsewhere")
    (path / "journal").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartupError, match="cannot be read"):
        read(path)


def test_a_file_without_the_header_is_refused_as_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "j"
    write(path, (b"one", True))
    (path / "journal").write_bytes(b"something else")
    with pytest.raises(StartupError, match="no journal of this version"):
        read(path)


def test_a_full_disk_is_reported_once_by_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    file = JournalFile(str(tmp_path / "j"), said.append)

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    file.rewrite([b"one"])
    file.append(b"two")
    file.close()
    assert len(said) == 1 and "is not written any more: No space left on device" in said[0]


@pytest.mark.parametrize(
    ("table", "row"),
    [
        (state_log.ACTOR, b"no row"),
        (state_log.ACTOR, msgspec.msgpack.encode(["ALIVE", 0, b"", 0, "", b"", False, True, []])),
        (state_log.GROUP, msgspec.msgpack.encode(["another", "version"])),
        (state_log.VALUE, b"value"),
    ],
)
def test_journal_records_that_cannot_be_decoded_stop_the_start(tmp_path: Path, table: int, row: bytes) -> None:
    """Before anything else begins; an actor's row without that of its spec too."""
    path = tmp_path / "j"
    write(path, (msgspec.msgpack.encode([RowChange(table, b"\0\0\0\1\xff", row)]), True))
    file = JournalFile(str(path), quiet)
    with pytest.raises(StartupError, match=rf"the journal in {path} is damaged, or of another version .*hint: remove"):
        read_back(file)
    file.close()


class Stuck:
    """A file system that answers no more, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, fd: int, data: bytes) -> int:
        self.asked.set()
        self.go_on.wait(60)
        return self._write(fd, data)


def test_closing_the_journal_does_not_wait_for_a_silent_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(journal_file, "_CLOSE_TIMEOUT", 0.05)
    stuck = Stuck(monkeypatch)
    file = JournalFile(str(tmp_path / "j"), said.append)
    file.rewrite([b"one"])
    file.close()
    assert len(said) == 1 and "lacks its end: the file system has not answered" in said[0]
    stuck.go_on.set()
    for thread in file._threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in file._threads)


def test_a_rewrite_drops_records_queued_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(monkeypatch)
    file = JournalFile(str(tmp_path / "j"), quiet)
    file.rewrite([b"first"])
    assert stuck.asked.wait(30)
    for number in range(100):
        file.rewrite([b"whole %d" % number])
        file.append(b"more %d" % number)
    assert file._jobs.qsize() == 2
    stuck.go_on.set()
    file.close()
    assert read(tmp_path / "j") == [b"whole 99", b"more 99"]
