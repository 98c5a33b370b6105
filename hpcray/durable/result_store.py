"""The directory of kept results: packs of small ones, files of large ones, and where each key is.

Nothing in it is trusted before it is judged: each file is judged once it is open (`platform.private_files`), each
record by its check before a byte of it is unpickled. The tables beside packs (`.idx`) only say where to look.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from hpcray.platform.private_files import OTHERS, PrivateDirectory
from hpcray.protocol.serialization import Serialized

# ------------------------------------------------------------ records
# Records of kept results: their layout in a pack, and how a torn or foreign one is recognised.
#
# A pack is a file to which the processes of one node append records, each with one `write`::
#
# magic 8 B | key 32 B | kind u8 | flags u8 | meta size u32 | data size u64 | time f64 | header check 4 B |
# meta | data | check 16 B
#
# The header has a check of its own, so that a look through a pack need not read the data. A process that is killed
# while it writes leaves a torn record; what others append behind it is found by its magic.

MAGIC = b"\x93hpcdr1\n"
_HEADER = struct.Struct("<8s32sBBIQd")
_CHECKED_HEADER = struct.Struct("<8s32sBBIQdI")
HEADER_BYTES = _HEADER.size + 4
CHECK_BYTES = 16
KEY_BYTES = 32
VALUE, ERROR, STREAM_END, FUNCTION = 1, 2, 3, 4
"""Kinds: what a task returned, or an item of a stream; what it raised; how many items a stream has; what a part of keys
was made of."""
IN_FILE, REBOUND = 1, 2
"""Flags: the data is the name of a file with the values; the values are a pickle of the room's own, not a blob."""


class Meta(msgspec.Struct, array_like=True, frozen=True):
    """The part of a record that describes it.

    Attributes:
        name: of the function. function: digest of all but the arguments, under which a FUNCTION record describes it.
        arguments: the name of each argument, and the beginning of its canonical bytes or their digest.
        needs: classes and functions of the program that the value names: (module, qualified name, digest).
        versions: packages that the value names: (module, version).
        size: bytes of the value. expires: Unix time after which it may be removed; 0 for never.
        seconds: for which the function ran.
    """

    name: str = ""
    function: bytes = b""
    arguments: Sequence[tuple[str, bytes]] = ()
    needs: Sequence[tuple[str, str, bytes]] = ()
    versions: Sequence[tuple[str, str]] = ()
    size: int = 0
    expires: float = 0.0
    seconds: float = 0.0


class Description(msgspec.Struct, array_like=True, frozen=True):
    """The data of a FUNCTION record: what goes into all keys of one function.

    Attributes:
        parts: label and digest of each function, class, global and package. settings: name and value of the rest.
    """

    parts: Sequence[tuple[str, bytes]] = ()
    settings: Sequence[tuple[str, str]] = ()


class Header(NamedTuple):
    """The header of a record."""

    key: bytes
    kind: int
    flags: int
    meta_size: int
    data_size: int
    time: float

    @property
    def size(self) -> int:
        """Bytes of the whole record."""
        return HEADER_BYTES + self.meta_size + self.data_size + CHECK_BYTES


class KeptRecord(NamedTuple):
    """A record whose check was right."""

    header: Header
    meta: Meta
    data: memoryview


encode_meta = msgspec.msgpack.Encoder().encode
_decode_meta = msgspec.msgpack.Decoder(Meta).decode
encode_description = msgspec.msgpack.Encoder().encode
decode_description = msgspec.msgpack.Decoder(Description).decode


def make_record(key: bytes, kind: int, flags: int, time: float, meta: bytes, data: bytes) -> bytes:
    """Return a record as it stands in a pack."""
    header = _HEADER.pack(MAGIC, key, kind, flags, len(meta), len(data), time)
    content = b"".join((header, zlib.crc32(header).to_bytes(4, "little"), meta, data))
    return content + hashlib.blake2b(content, digest_size=CHECK_BYTES).digest()


def read_header(content: Any, at: int) -> Header | None:
    """Return the header that begins at an offset; None if there is none, or not all of it."""
    if len(content) < at + HEADER_BYTES:
        return None
    magic, key, kind, flags, meta_size, data_size, since, check = _CHECKED_HEADER.unpack_from(content, at)
    if magic != MAGIC or zlib.crc32(content[at : at + _HEADER.size]) != check:
        return None
    # As `Header(...)` would; a directory may have a million of them.
    return tuple.__new__(Header, (key, kind, flags, meta_size, data_size, since))


def read_record(content: bytes | memoryview, key: bytes) -> KeptRecord | None:
    """Return a record, judged by its check; None if it is not whole, or is that of another key."""
    view = memoryview(content)
    header = read_header(view, 0)
    if header is None or header.key != key or header.size != len(view):
        return None
    body = len(view) - CHECK_BYTES
    if hashlib.blake2b(view[:body], digest_size=CHECK_BYTES).digest() != view[body:]:
        return None
    try:
        meta = _decode_meta(view[HEADER_BYTES : HEADER_BYTES + header.meta_size])
    except msgspec.MsgspecError:
        return None
    return KeptRecord(header, meta, view[HEADER_BYTES + header.meta_size : body])


def scan(content: Any, start: int, size: int, find: Any) -> Iterator[tuple[int, Header | None]]:
    """Go through the records of a pack.

    Args:
        content: the pack, as a map or bytes. start: where to begin. size: bytes of it that count.
        find: `content.find`.

    Yields:
        Offset and header of each record that may be whole; last the offset from which to look again, with None.
    """
    at = start
    while at + HEADER_BYTES <= size:
        header = read_header(content, at)
        if header is not None:
            end = at + HEADER_BYTES + header[3] + header[4] + CHECK_BYTES
            if end <= size and (end + 8 > size or content[end : end + 8] == MAGIC):
                yield at, header
                at = end
                continue
        following = find(MAGIC, at + 1, size)
        while following >= 0 and following + HEADER_BYTES <= size and read_header(content, following) is None:
            following = find(MAGIC, following + 1, size)
        if following < 0 or following + HEADER_BYTES > size:
            if header is not None and at + header.size <= size:  # garbage behind it, which may be the start of the next
                yield at, header
                at += header.size
            break
        at = following
    yield at, None


_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


def join_values(blobs: Sequence[bytes]) -> bytes:
    """Several blobs as one."""
    return b"".join((_COUNT.pack(len(blobs)), *(_LENGTH.pack(len(blob)) for blob in blobs), *blobs))


def split_values(data: memoryview) -> list[memoryview]:
    """The blobs that `join_values` joined.

    Raises:
        ValueError: it is not of this form.
    """
    try:
        (count,) = _COUNT.unpack_from(data)
        at = _COUNT.size + count * _LENGTH.size
        blobs = []
        for index in range(count):
            (length,) = _LENGTH.unpack_from(data, _COUNT.size + index * _LENGTH.size)
            blobs.append(data[at : at + length])
            at += length
    except struct.error as error:
        raise ValueError(f"no list of values: {error}") from None
    if at != len(data):
        raise ValueError(f"a list of values of {len(data)} bytes, not {at}")
    return blobs


# ------------------------------------------------------------ result store

LARGE = 1 << 17
"""Bytes of values above which they get a file of their own."""
_PACK, _TABLE, _FILES = ".pack", ".idx", "files"
_PACK_LIMIT = 1 << 30
"""Bytes of a pack after which a node begins another."""
_TABLE_FROM = 1 << 20
"""Bytes of a pack that were looked through before the result is kept in a table."""
_OPEN_PACKS = 64
_ROW = np.dtype(
    [
        ("key", f"S{KEY_BYTES}"),
        ("at", "<u8"),
        ("size", "<u8"),
        ("time", "<f8"),
        ("kind", "u1"),
        ("flags", "u1"),
        ("pack", "<u4"),
    ]
)
_HEAD = np.dtype("<u8")
_TABLE_MAGIC = b"hpcridx1"


class RecordPlace(NamedTuple):
    """Where a record is."""

    pack: int
    at: int
    size: int
    time: float
    kind: int
    flags: int


class Pack:
    """A pack as a reader knows it.

    Attributes:
        name: of the file. scanned: bytes that were looked through. tabled: those that its table has.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.scanned = self.tabled = 0
        self.fd = -1
        self.bad = ""


class ResultStore:
    """Kept results in one directory, for one process that reads and writes. Not safe for several threads at once.

    Args:
        path: of the directory; made where it is missing.
        node: names the packs of this node in this job.

    Attributes:
        problems: damaged or untrusted records and files that were found, and are not reported yet.

    Raises:
        OSError: it cannot be made or opened, or it is not this user's alone to write.
    """

    def __init__(self, path: str, node: str = "", make: bool = True) -> None:
        self.path = path
        self._directory = PrivateDirectory.open(path, make, OTHERS, ancestors=True)
        self._node = node
        self._packs: list[Pack] = []
        self._by_name: dict[str, Pack] = {}
        self._recent: dict[bytes, RecordPlace] = {}
        self._sorted = np.empty(0, _HEAD), np.empty(0, _ROW)
        self._open: list[Pack] = []
        self._out = -1
        self._out_name = ""
        self._number = 0
        self._written = False
        self.problems: list[str] = []

    def close(self) -> None:
        """Close all files."""
        for pack in self._open:
            os.close(pack.fd)
            pack.fd = -1
        self._open.clear()
        if self._out >= 0:
            os.close(self._out)
            self._out = -1
        self._directory.close()

    # ------------------------------------------------------------ looking

    def refresh(self) -> None:
        """Look at what was written since the last time."""
        fresh: list[Any] = []
        for name in self._directory.names():
            if not name.endswith(_PACK):
                continue
            pack = self._by_name.get(name)
            if pack is None:
                pack = Pack(name)
                self._by_name[name] = pack
                self._packs.append(pack)
                self._load_table(pack, fresh)
            self._scan(pack)
        if fresh:
            self._merge(fresh)

    def find(self, key: bytes) -> RecordPlace | None:
        """Return where the last record of a key is, as far as it is known."""
        place = self._recent.get(key)
        if place is not None:
            return place
        heads, rows = self._sorted
        if len(heads):
            head = int.from_bytes(key[:8], "little")
            at = int(heads.searchsorted(np.uint64(head)))
            best: RecordPlace | None = None
            while at < len(heads) and int(heads[at]) == head:
                row = rows[at]
                if row["key"].ljust(KEY_BYTES, b"\0") == key:
                    place = _place_of(row)
                    best = place if best is None or place.time >= best.time else best
                at += 1
            return best
        return None

    def read(self, key: bytes, place: RecordPlace, values: bool = True) -> KeptRecord | None:
        """Return the record of a key; None if it is broken, or gone.

        Args:
            values: whether values in a file of their own are read too; they are in `data` then.
        """
        pack = self._packs[place.pack]
        try:
            fd = self._descriptor(pack)
            record = read_record(os.pread(fd, place.size, place.at), key) if fd >= 0 else None
            if values and record is not None and record.header.flags & IN_FILE:
                record = self._read_file(record)
        except OSError as error:
            self._tell(f"{self._directory.path_of(pack.name)}: {error.strerror or error}")
            record = None
        if record is None:
            self._recent.pop(key, None)
            self._tell(f"{self._directory.path_of(pack.name)} at {place.at}: a record that is not whole")
        return record

    def read_at(self, key: bytes, name: str, at: int, size: int) -> KeptRecord | None:
        """Return the record of a key that another process has found; None if it is broken, or gone."""
        pack = self._by_name.get(name)
        if pack is None:
            if "/" in name or not name.endswith(_PACK):
                return None
            pack = self._by_name[name] = Pack(name)
            self._packs.append(pack)
        return self.read(key, RecordPlace(self._packs.index(pack), at, size, 0.0, 1, IN_FILE))

    def name_of(self, place: RecordPlace) -> str:
        """The name of the pack in which a record is."""
        return self._packs[place.pack].name

    def forget(self, key: bytes) -> None:
        """A record was not of use: it is not found any more by this process, until it is written again."""
        place = self.find(key)
        if place is not None:
            self._recent[key] = place._replace(kind=0)

    def _tell(self, problem: str) -> None:
        if len(self.problems) < 100:
            self.problems.append(problem)

    def _descriptor(self, pack: Pack) -> int:
        if pack.fd < 0 and not pack.bad:
            try:
                pack.fd = self._directory.open_file(pack.name, os.O_RDONLY, OTHERS)
            except PermissionError as error:
                pack.bad = str(error)
                self._tell(pack.bad)
                return -1
            self._open.append(pack)
            if len(self._open) > _OPEN_PACKS:
                oldest = self._open.pop(0)
                os.close(oldest.fd)
                oldest.fd = -1
        return pack.fd

    def _scan(self, pack: Pack) -> None:
        try:
            fd = self._descriptor(pack)
            size = os.fstat(fd).st_size if fd >= 0 else 0
        except OSError:
            return
        if size <= pack.scanned:
            return
        number = self._packs.index(pack) if self._packs[-1] is not pack else len(self._packs) - 1
        recent = self._recent
        with mmap.mmap(fd, size, prot=mmap.PROT_READ) as content:
            for at, header in scan(content, pack.scanned, size, content.find):
                if header is None:
                    pack.scanned = at
                    break
                key, kind, flags, meta_size, data_size, since = header
                known = recent.get(key)
                if known is None or known.time <= since or known.kind == 0:
                    whole = HEADER_BYTES + meta_size + data_size + CHECK_BYTES
                    recent[key] = tuple.__new__(RecordPlace, (number, at, whole, since, kind, flags))
        if pack.scanned - pack.tabled >= _TABLE_FROM:
            self._write_table(pack, number)

    # ------------------------------------------------------------ tables

    def _write_table(self, pack: Pack, number: int) -> None:
        """Keep where the records of a pack are. A failure costs the next reader time only."""
        rows = [(key, p.at, p.size, p.time, p.kind, p.flags, 0) for key, p in self._recent.items() if p.pack == number]
        made = np.array(rows, _ROW)
        known = self._sorted[1]
        if len(known):
            made = np.concatenate([known[known["pack"] == number], made])
            made["pack"] = 0
        content = _TABLE_MAGIC + pack.scanned.to_bytes(8, "little") + made.tobytes()
        content += hashlib.blake2b(content, digest_size=16).digest()
        with contextlib.suppress(OSError):
            self._directory.write(pack.name.removesuffix(_PACK) + _TABLE, content)
            pack.tabled = pack.scanned

    def _load_table(self, pack: Pack, fresh: list[Any]) -> None:
        try:
            content = self._directory.read(pack.name.removesuffix(_PACK) + _TABLE, OTHERS)
        except OSError:
            return
        if content[:8] != _TABLE_MAGIC or (len(content) - 32) % _ROW.itemsize:
            return
        if hashlib.blake2b(memoryview(content)[:-16], digest_size=16).digest() != content[-16:]:
            return
        rows = np.frombuffer(content, _ROW, (len(content) - 32) // _ROW.itemsize, 16).copy()
        rows["pack"] = len(self._packs) - 1
        fresh.append(rows)
        pack.scanned = pack.tabled = int.from_bytes(content[8:16], "little")

    def _merge(self, fresh: list[Any]) -> None:
        rows = np.concatenate([self._sorted[1], *fresh])
        heads = np.frombuffer(rows["key"].astype(f"S{KEY_BYTES}").tobytes(), "u1").reshape(-1, KEY_BYTES)
        keys = np.ascontiguousarray(heads[:, :8]).view(_HEAD).ravel()
        order = np.argsort(keys, kind="stable")
        self._sorted = keys[order], rows[order]

    # ------------------------------------------------------------ writing (one thread)

    def append(self, records: Sequence[bytes]) -> None:
        """Append records to the pack of this node.

        Raises:
            OSError: the file system refuses.
        """
        if self._out < 0 or self._full():
            self._next_pack()
        content = b"".join(records)
        written = os.write(self._out, content)
        if written != len(content):  # nothing of ours may be cut short in the middle of another's record
            raise OSError(28, os.strerror(28), self._directory.path_of(self._out_name))
        self._written = True

    def _full(self) -> bool:
        state = os.fstat(self._out)
        return state.st_size > _PACK_LIMIT or state.st_nlink == 0

    def _next_pack(self) -> None:
        if self._out >= 0:
            os.close(self._out)
            self._out = -1
            self._number += 1
        while True:
            self._out_name = f"{self._node}-{self._number}{_PACK}"
            self._out = self._directory.append(self._out_name)
            if not self._full():
                return
            os.close(self._out)
            self._out = -1
            self._number += 1

    def sync(self) -> None:
        """Have what was appended on the disk."""
        if self._written and self._out >= 0:
            self._written = False
            os.fdatasync(self._out)

    def write_file(self, key: bytes, blobs: Sequence[bytes | Serialized]) -> tuple[bytes, int]:
        """Write large values into a file of their own; it is whole, or not there.

        Returns:
            The data of the record that names it, and the bytes of the values.
        """
        shelf, name = key[:1].hex(), f"{key.hex()}-{os.urandom(4).hex()}"
        with self._directory.directory(_FILES) as files, files.directory(shelf) as directory:
            temporary = f".{name}.new"
            fd = directory.open_file(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                check = _write_values(fd, blobs)
                os.rename(temporary, name, src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
            except BaseException:
                directory.remove(temporary)
                raise
            finally:
                os.close(fd)
        size = sum(blob.size if isinstance(blob, Serialized) else len(blob) for blob in blobs)
        return check + f"{shelf}/{name}".encode(), size

    def _read_file(self, record: KeptRecord) -> KeptRecord | None:
        check, (shelf, _, name) = bytes(record.data[:32]), bytes(record.data[32:]).decode().partition("/")
        if "/" in name or len(shelf) != 2 or name.startswith("."):
            return None
        with self._directory.directory(_FILES, False) as files, files.directory(shelf, False) as directory:
            content = directory.read(name, OTHERS)
        if hashlib.sha256(content).digest() != check:
            self._tell(f"{self._directory.path_of(_FILES)}/{shelf}/{name}: its content is not what was written")
            return None
        return record._replace(data=memoryview(content))

    # ------------------------------------------------------------ all entries

    def entries(self) -> Iterator[tuple[bytes, RecordPlace]]:
        """All entries that can be found, each once."""
        for key, place in self._recent.items():
            if place.kind:
                yield key, place
        seen = self._recent
        for row in self._sorted[1]:
            key = row["key"].ljust(KEY_BYTES, b"\0")
            if key not in seen:
                yield key, _place_of(row)

    def oldest_beyond(self, limit: int) -> float:
        """Return the time before which results have to go, so that the rest takes no more than a number of bytes."""
        sizes = []
        for key, place in self.entries():
            size = place.size
            if place.flags & IN_FILE and (record := self.read(key, place, values=False)) is not None:
                size += record.meta.size
            sizes.append((place.time, size))
        left = limit
        for since, size in sorted(sizes, reverse=True):
            left -= size
            if left < 0:
                return since + 1e-6
        return 0.0

    def shrink(self, limit: int) -> None:
        """Remove the oldest results, where all of them take more than a number of bytes."""
        if self.totals()[1] > limit:
            oldest = self.oldest_beyond(limit)
            self.remove(lambda key, place, meta: place.time < oldest and place.kind != FUNCTION)
            self.refresh()

    def totals(self) -> tuple[int, int, int]:
        """Entries, bytes and files of the directory."""
        entries = len(self._recent) + len(self._sorted[1])
        size = files = 0
        for name in self._directory.names():
            with contextlib.suppress(OSError):
                state = os.stat(name, dir_fd=self._directory.fd, follow_symlinks=False)
                if name != _FILES:
                    size, files = size + state.st_size, files + 1
        for _, state in self.files():
            size, files = size + state.st_size, files + 1
        return entries, size, files

    def files(self) -> Iterator[tuple[str, os.stat_result]]:
        """The files of large values: name and state."""
        try:
            shelves = self._directory.directory(_FILES, False)
        except OSError:
            return
        with shelves:
            for shelf in shelves.names():
                with contextlib.suppress(OSError), shelves.directory(shelf, False) as directory:
                    for name in directory.names():
                        yield f"{shelf}/{name}", os.stat(name, dir_fd=directory.fd, follow_symlinks=False)

    def remove(self, gone: Callable[[bytes, RecordPlace, Meta], bool], quiet: float = 60.0) -> tuple[int, int]:
        """Remove entries: packs are written anew without them.

        Args:
            gone: called with each entry; True for what goes.
            quiet: seconds for which a pack must not have been written, or it stays as it is: a job may be using it.

        Returns:
            How many entries went, and how many bytes.
        """
        removed = freed = 0
        kept_files = set()
        now = time.time()
        for pack in list(self._packs):
            number = self._packs.index(pack)
            fd = self._descriptor(pack)
            if fd < 0:
                continue
            state = os.fstat(fd)
            busy = now - state.st_mtime < quiet
            kept, goes = [], 0
            with mmap.mmap(fd, state.st_size, prot=mmap.PROT_READ) if state.st_size else _Empty() as content:
                for at, header in scan(content, 0, state.st_size, content.find) if state.st_size else ():
                    if header is None:
                        continue
                    record = read_record(content[at : at + header.size], header.key)
                    place = RecordPlace(number, at, header.size, header.time, header.kind, header.flags)
                    latest = self.find(header.key)
                    stale = latest is not None and (latest.pack, latest.at) != (number, at)
                    if record is None or stale or (not busy and gone(header.key, place, record.meta)):
                        goes += 1
                        if record is not None and not stale:
                            removed += not busy
                        if not busy:
                            continue
                    kept.append(content[at : at + header.size])
                    if record is not None and header.flags & IN_FILE:
                        kept_files.add(bytes(record.data[32:]).decode())
            if busy or not goes:
                continue
            freed += state.st_size - sum(map(len, kept))
            stem = pack.name.removesuffix(_PACK)
            if kept:
                self._directory.write(f"{stem.partition('~')[0]}~{os.urandom(4).hex()}{_PACK}", b"".join(kept))
            self._directory.remove(pack.name)
            self._directory.remove(stem + _TABLE)
        for name, state in list(self.files()):
            if name not in kept_files and now - state.st_mtime >= quiet:
                shelf, _, base = name.partition("/")
                with self._directory.directory(_FILES) as files, files.directory(shelf) as directory:
                    directory.remove(base)
                freed += state.st_size
        return removed, freed


def _place_of(row: Any) -> RecordPlace:
    return RecordPlace(
        int(row["pack"]), int(row["at"]), int(row["size"]), float(row["time"]), int(row["kind"]), int(row["flags"])
    )


class _Empty:
    def __enter__(self) -> bytes:
        return b""

    def __exit__(self, *_: object) -> None:
        pass


def value_record(
    store: ResultStore | None, key: bytes, kind: int, flags: int, meta: Meta, blobs: Sequence[bytes | Serialized]
) -> bytes:
    """Return the record of values; large ones are in a file then.

    Args:
        store: where that file goes; None: they are small.
    """
    size = sum(blob.size if isinstance(blob, Serialized) else len(blob) for blob in blobs)
    now = time.time()
    if size > LARGE:
        assert store is not None
        data, _ = store.write_file(key, blobs)
        flags |= IN_FILE
    else:
        data = join_values([blob.join() if isinstance(blob, Serialized) else blob for blob in blobs])
    return make_record(key, kind, flags, now, encode_meta(meta), data)


def _write_values(fd: int, blobs: Sequence[bytes | Serialized]) -> bytes:
    """Write what `join_values` would return, without that copy; returns the digest of it."""
    made = hashlib.sha256()

    def put(content: Any) -> None:
        view = memoryview(content).cast("B") if not isinstance(content, bytes) else memoryview(content)
        made.update(view)
        while len(view):
            view = view[os.write(fd, view[: 1 << 24]) :]

    sizes = [blob.size if isinstance(blob, Serialized) else len(blob) for blob in blobs]
    put(len(blobs).to_bytes(4, "little") + b"".join(size.to_bytes(8, "little") for size in sizes))
    for blob in blobs:
        if not isinstance(blob, Serialized):
            put(blob)
            continue
        at = 0
        for offset, piece in blob.pieces():
            put(bytes(offset - at))
            put(piece)
            at = offset + memoryview(piece).nbytes
        assert at == blob.size
    return made.digest()


# ------------------------------------------------------------ result io
# The thread through which a process reads and writes its directory of kept results, so that no file system, however
# slow or full, can hold up a job: what takes too long, or fails, turns durability off, and is reported once.

T = TypeVar("T")
_SYNC_PERIOD = 1.0
"""Seconds after which what was written is on the disk, at the latest."""
_GROUP = 0.02
"""Seconds between two writes; what comes in between is written together."""
_MOST_WAITING = 64 << 20
"""Bytes of records that may wait to be written."""


def state_directory(configured: str) -> str:
    """The directory of kept results: that of the setting, or one in the user's home."""
    if configured:
        return os.path.abspath(os.path.expanduser(configured))
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(home, "hpcray", "durable")


class ResultIo:
    """Reads and writes kept results for one process.

    Args:
        path: of the directory. node: names the packs of this node.
        timeout: seconds that a call may take. complain: called, once, with why durability is off.

    Attributes:
        off: why nothing is read or written any more; "" while all is well.
    """

    def __init__(self, path: str, node: str, timeout: float, complain: Callable[[str], object]) -> None:
        self.path = path
        self.off = ""
        self._node, self._timeout, self._complain = node, timeout, complain
        self._store: ResultStore | None = None
        self._work: deque[tuple[Callable[[ResultStore], Any], _Answer | None]] = deque()
        self._records: deque[bytes] = deque()
        self._bytes = 0
        self._wake = threading.Event()
        self._hurry = threading.Event()
        self._progress = threading.Condition()
        self._given = self._done = 0
        self._start = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._closing = False

    @property
    def store(self) -> ResultStore | None:
        """The directory, for lookups in memory; None before it was opened, and where it cannot be."""
        return self._store

    def call(self, what: Callable[[ResultStore], T], extra: float = 0.0) -> T | None:
        """Call a function with the directory in the thread, and return its result; None where durability is off.

        Args:
            extra: seconds that it may take beyond the timeout.
        """
        if self.off or os.getpid() != self._pid:
            return None
        answer = _Answer()
        self._work.append((what, answer))
        self._hurry.set()
        self._notify()
        if not answer.done.wait(self._timeout + extra):
            answer.abandoned = True
            self.turn_off(f"{self.path} has not answered for {self._timeout + extra:g} s")
            return None
        value: T = answer.value
        return value

    def post(self, what: Callable[[ResultStore], Any]) -> None:
        """Call a function with the directory soon."""
        if not self.off and os.getpid() == self._pid:
            self._work.append((what, None))
            self._notify()

    def write(self, record: bytes) -> None:
        """Write a record soon, together with others."""
        if self.off or os.getpid() != self._pid:
            return
        self._records.append(record)
        self._given += 1
        self._bytes += len(record)
        if self._bytes > _MOST_WAITING:
            self.turn_off(f"{self.path} is too slow: {self._bytes >> 20} MiB wait to be written")
            return
        self._notify()

    def written(self, timeout: float) -> bool:
        """Wait until all records are with the file system; False if it takes longer."""
        if self.off or os.getpid() != self._pid:
            return True
        wanted = self._given
        self._hurry.set()
        with self._progress:
            return self._progress.wait_for(lambda: self._done >= wanted or bool(self.off), timeout)

    def close(self, timeout: float = 2.0) -> None:
        """Write what waits, and end the thread."""
        self._closing = True
        if self._thread is not None and os.getpid() == self._pid:
            self._hurry.set()
            self._wake.set()
            self._thread.join(timeout)

    def turn_off(self, why: str) -> None:
        """Go on as if nothing were durable."""
        if not self.off:
            self.off = why
            self._records.clear()
            self._bytes = 0
            with self._progress:
                self._progress.notify_all()
            self._complain(why)

    def _notify(self) -> None:
        if self._thread is None:
            with self._start:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="hpcray-durable", daemon=True)
                    self._thread.start()
        self._wake.set()

    def _run(self) -> None:
        synced = time.monotonic()
        dirty = False
        while True:
            limit = 1.0 if self._closing else None
            self._wake.wait(max(0.0, synced + _SYNC_PERIOD - time.monotonic()) if dirty else limit)
            self._wake.clear()
            try:
                store = self._opened()
                while self._work:
                    what, answer = self._work.popleft()
                    try:
                        value = what(store)
                        if answer is not None:
                            answer.value = value
                    finally:
                        if answer is not None:
                            answer.done.set()
                    if answer is not None and answer.abandoned:
                        return
                records = []
                while self._records:
                    records.append(self._records.popleft())
                if records:
                    store.append(records)
                    self._bytes -= sum(map(len, records))
                    dirty = True
                    with self._progress:
                        self._done += len(records)
                        self._progress.notify_all()
                if dirty and (self._closing or time.monotonic() - synced >= _SYNC_PERIOD):
                    store.sync()
                    synced, dirty = time.monotonic(), False
            except OSError as error:
                self.turn_off(str(error) if error.filename else f"{self.path}: {error.strerror or error}")
            except Exception as error:  # what is broken there must not end the job
                self.turn_off(f"{self.path}: {type(error).__name__}: {error}")
            if self.off:
                while self._work:
                    _, answer = self._work.popleft()
                    if answer is not None:
                        answer.done.set()
                return
            if not self._work and not self._records:
                if self._closing:
                    return
                if records:
                    self._hurry.clear()
                    self._hurry.wait(_GROUP)

    def _opened(self) -> ResultStore:
        if self._store is None:
            store = ResultStore(self.path, self._node)
            store.refresh()
            self._store = store
        return self._store


class _Answer:
    def __init__(self) -> None:
        self.value: Any = None
        self.done = threading.Event()
        self.abandoned = False
