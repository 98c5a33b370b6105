"""The directory of kept results: torn and damaged files, two writers, a full disk, and files planted by others."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import pickle
import time
from pathlib import Path

import pytest
from helpers.strangers import plant

from hpcray.durable import result_store
from hpcray.durable.result_store import (
    FUNCTION,
    LARGE,
    VALUE,
    Meta,
    ResultIo,
    ResultStore,
    encode_meta,
    make_record,
    split_values,
    value_record,
)
from hpcray.platform.private_files import UntrustedPathError


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def record(number: int, value: bytes = b"value", name: str = "f", **meta: float) -> bytes:
    return value_record(None, key(number), VALUE, 0, Meta(name=name, **meta), [value])  # type: ignore[arg-type]


def values(store: ResultStore, number: int) -> list[bytes] | None:
    place = store.find(key(number))
    found = store.read(key(number), place) if place is not None else None
    return [bytes(blob) for blob in split_values(found.data)] if found is not None else None


def reader(path: Path) -> ResultStore:
    store = ResultStore(str(path))
    store.refresh()
    return store


def test_a_record_is_found_by_another_reader(tmp_path: Path) -> None:
    store = ResultStore(str(tmp_path / "store"), "n0")
    store.append([record(1), record(2, b"two")])
    other = reader(tmp_path / "store")
    assert values(other, 1) == [b"value"]
    assert values(other, 2) == [b"two"]
    assert values(other, 3) is None
    store.append([record(1, b"newer")])
    other.refresh()
    assert values(other, 1) == [b"newer"]


def test_a_pack_torn_at_any_byte_gives_whole_records_or_none(tmp_path: Path) -> None:
    records = [record(number, bytes([number]) * 40) for number in range(3)]
    whole = b"".join(records)
    ends = [sum(map(len, records[: count + 1])) for count in range(3)]
    for cut in range(len(whole)):
        path = tmp_path / f"store-{cut}"
        path.mkdir(mode=0o700)
        (path / "a-0.pack").write_bytes(whole[:cut])
        (path / "a-0.pack").chmod(0o600)
        store = reader(path)
        for number in range(3):
            assert values(store, number) == ([bytes([number]) * 40] if cut >= ends[number] else None)
        with open(path / "a-0.pack", "ab") as file:  # another process of the node goes on behind the torn record
            file.write(record(7, b"behind"))
        store.refresh()
        assert values(store, 7) == [b"behind"]
        store.close()


def test_no_flipped_byte_gives_a_wrong_value(tmp_path: Path) -> None:
    path = tmp_path / "store"
    ResultStore(str(path), "n0").append([record(1, b"x" * 40), record(2)])
    pack = path / "n0-0.pack"
    whole = pack.read_bytes()
    for at in range(len(whole)):
        pack.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        store = reader(path)
        assert values(store, 1) in ([b"x" * 40], None)
        assert values(store, 2) in ([b"value"], None)
        assert values(store, 1) is not None or values(store, 2) is not None
        store.close()


def test_a_damaged_large_value_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = ResultStore(str(path), "n0")
    store.append([value_record(store, key(1), VALUE, 0, Meta(), [b"x" * (LARGE + 1)])])
    assert values(reader(path), 1) == [b"x" * (LARGE + 1)]
    (file,) = (path / "files").glob("*/*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    damaged = reader(path)
    assert values(damaged, 1) is None
    assert any("not what was written" in problem for problem in damaged.problems)
    file.unlink()
    assert values(reader(path), 1) is None


def test_a_large_value_torn_or_flipped_at_any_byte_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_store, "LARGE", 8)
    path = tmp_path / "store"
    store = ResultStore(str(path), "n0")
    store.append([value_record(store, key(1), VALUE, 0, Meta(), [b"x" * 40, b"y"])])
    (file,) = (path / "files").glob("*/*")
    whole = file.read_bytes()
    for at in range(len(whole)):
        for content in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :], whole + b"more"):
            file.write_bytes(content)
            found = reader(path)
            assert values(found, 1) is None
            assert any("not what was written" in problem for problem in found.problems)
            found.close()
    file.write_bytes(whole)
    assert values(reader(path), 1) == [b"x" * 40, b"y"]


def test_a_table_torn_or_flipped_at_any_byte_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_store, "_TABLE_FROM", 1)
    path = tmp_path / "store"
    ResultStore(str(path), "n0").append([record(1), record(2)])
    reader(path).close()
    table = path / "n0-0.idx"
    whole = table.read_bytes()
    for at in range(len(whole)):
        for content in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :]):
            table.write_bytes(content)
            found = reader(path)
            assert values(found, 1) == values(found, 2) == [b"value"]
            found.close()


def _write(path: str, node: str, first: int) -> None:
    store = ResultStore(path, node)
    for number in range(first, first + 200):
        store.append([record(number), record(5000, str(number).encode())])


def test_writers_of_one_node_and_of_two_jobs_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(path, f"n{i // 2}", i * 200)) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    store = reader(tmp_path / "store")
    assert all(values(store, number) == [b"value"] for number in range(800))
    (last,) = values(store, 5000) or [b""]
    assert int(last) in (199, 399, 599, 799)
    assert store.problems == []


class Planted:
    """Shows that it was unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.putenv, ("PLANTED", "1")


@pytest.mark.parametrize("how", ["owner", "mode", "link", "symbolic link", "pipe"])
def test_a_file_that_another_user_could_have_planted_is_not_read(tmp_path: Path, how: str) -> None:
    path = tmp_path / "store"
    store = ResultStore(str(path), "n0")
    store.append([record(1)])
    planted = tmp_path / "planted"
    planted.write_bytes(record(2, pickle.dumps(Planted()) + b"\0"))
    planted.chmod(0o600)
    name = path / "z-0.pack"
    plant(how, planted, name)
    found = reader(path)
    assert values(found, 1) == [b"value"]
    assert values(found, 2) is None
    assert how == "pipe" or any("z-0.pack" in problem for problem in found.problems)


@pytest.mark.parametrize("how", ["owner", "link", "symbolic link", "directory"])
def test_a_large_value_that_another_user_could_have_planted_is_not_read(tmp_path: Path, how: str) -> None:
    path = tmp_path / "store"
    store = ResultStore(str(path), "n0")
    store.append([value_record(store, key(1), VALUE, 0, Meta(), [b"x" * (LARGE + 1)])])
    (file,) = (path / "files").glob("*/*")
    planted = tmp_path / "planted"
    os.rename(file, planted)
    plant(how, planted, file)
    found = reader(path)
    assert values(found, 1) is None
    assert found.problems


def test_a_directory_that_others_could_write_to_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.mkdir()
    path.chmod(0o770)
    with pytest.raises(UntrustedPathError, match="chmod"):
        ResultStore(str(path))


def test_a_full_disk_turns_durability_off_and_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    io = ResultIo(str(tmp_path / "store"), "n0", 5.0, told.append)
    io.call(lambda store: None)

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    for number in range(10):
        io.write(record(number))
    assert io.written(5.0)
    assert io.off
    assert len(told) == 1 and "No space left" in told[0]
    assert io.call(lambda store: 1) is None


def test_a_directory_that_does_not_answer_holds_nothing_up(tmp_path: Path) -> None:
    told: list[str] = []
    io = ResultIo(str(tmp_path / "store"), "n0", 0.2, told.append)
    began = time.monotonic()
    assert io.call(lambda store: time.sleep(1.0)) is None
    assert time.monotonic() - began < 0.9
    assert "has not answered" in told[0]
    io.write(record(1))
    assert io.off


def test_what_is_written_is_there_when_the_process_ends(tmp_path: Path) -> None:
    io = ResultIo(str(tmp_path / "store"), "n0", 5.0, print)
    for number in range(1000):
        io.write(record(number))
    io.close()
    store = reader(tmp_path / "store")
    assert all(values(store, number) for number in range(1000))
    assert store.totals()[2] == 1  # files


def test_entries_are_removed_and_the_rest_stays(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = ResultStore(str(path), "n0")
    store.append([record(number, name="old" if number < 5 else "new") for number in range(10)])
    store.append([value_record(store, key(20), VALUE, 0, Meta(name="old"), [b"x" * (LARGE + 1)])])
    store.append([make_record(key(30), FUNCTION, 0, time.time(), encode_meta(Meta(name="old")), b"")])
    found = reader(path)
    assert found.remove(lambda k, place, meta: meta.name == "old" and place.kind != FUNCTION)[0] == 0  # in use
    removed, freed = found.remove(lambda k, place, meta: meta.name == "old" and place.kind != FUNCTION, quiet=0.0)
    assert removed == 6
    assert freed > LARGE
    after = reader(path)
    assert [number for number in range(10) if values(after, number)] == [5, 6, 7, 8, 9]
    assert after.find(key(30)) is not None
    assert not list((path / "files").glob("*/*"))
    store.append([record(40)])  # the writer notices that its pack is gone
    assert values(reader(path), 40) == [b"value"]


def test_a_table_is_made_of_many_records_and_a_damaged_one_costs_time_only(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = ResultStore(str(path), "n0")
    store.append([record(number, b"x" * 200) for number in range(6000)])
    first = reader(path)
    table = path / "n0-0.idx"
    assert table.exists()
    second = reader(path)
    assert not second._recent
    assert all(values(second, number) for number in range(0, 6000, 97))
    assert second.totals()[0] == first.totals()[0] == 6000
    store.append([record(7000), record(3, b"newer")])
    second.refresh()
    assert values(second, 7000) and values(second, 3) == [b"newer"]
    content = bytearray(table.read_bytes())
    content[100] ^= 1
    table.write_bytes(content)
    assert all(values(reader(path), number) for number in (0, 3, 5999, 7000))


@pytest.mark.slow
def test_a_million_entries_are_counted_in_five_seconds(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = ResultStore(str(path), "n0")
    for start in range(0, 1_000_000, 10_000):
        store.append([record(number) for number in range(start, start + 10_000)])
    for _ in range(2):  # without and with a table
        began = time.process_time()
        assert reader(path).totals()[0] == 1_000_000
        assert time.process_time() - began < 5
