"""`hpcray durable`: the kept results of durable tasks, in the directory that this user's jobs share."""

from __future__ import annotations

import contextlib
import gc
import marshal
import os
import struct
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import click

from hpcray.cli import json_option, print_json
from hpcray.common.config import parse_size
from hpcray.common.terminal_text import plain
from hpcray.core.object_store.allocator import format_size
from hpcray.durable.result_store import (
    FUNCTION,
    STREAM_END,
    Description,
    Meta,
    RecordPlace,
    ResultStore,
    decode_description,
    state_directory,
)
from hpcray.platform.config_files import configured_environment
from hpcray.state.reports import format_duration, print_table

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_directory = click.option(
    "--dir", "directory", help="Directory of the results (default: $HPCRAY_DURABLE_DIR, or that in your home)."
)


class _Age(click.ParamType[float]):
    name = "time"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return float(value[:-1]) * _UNITS[value[-1]] if value[-1:] in _UNITS else float(value)
        except ValueError:
            self.fail(f"{value!r} is no time: 30d, 12h, 90 (seconds)")


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_size(value)
        except ValueError:
            self.fail(f"{value!r} is no size: 20g, 512m, or bytes")


@click.group()
def durable() -> None:
    """Kept results of durable tasks: list, explain and remove them."""


@durable.command()
@_directory
@json_option("an object: the path, entries, bytes, files")
def du(directory: str | None, as_json: bool) -> None:
    """Print how many results there are, and what they take."""
    with _opened(directory) as store:
        entries, size, files = store.totals()
        if as_json:
            print_json({"path": store.path, "entries": entries, "bytes": size, "files": files})
        else:
            click.echo(f"{entries:,} results, {format_size(size)} in {files:,} files, {store.path}")


@durable.command()
@_directory
@click.argument("name", required=False)
@click.option("-n", "--limit", default=50, show_default=True, help="Number of results, the newest first.")
@json_option("a list of results")
def ls(directory: str | None, name: str | None, limit: int, as_json: bool) -> None:
    """List results, those of the function NAME or all, the newest first."""
    with _opened(directory) as store:
        rows = []
        for key, place in sorted(store.entries(), key=lambda pair: -pair[1].time):
            if place.kind == FUNCTION:
                continue
            if (entry := read_entry(store, key, place)) is None or (name is not None and entry.meta.name != name):
                continue
            rows.append(entry)
            if len(rows) >= limit:
                break
        if as_json:
            print_json([_row(entry) for entry in rows])
            return
        now = time.time()
        print_table(
            ["key", "function", "arguments", "bytes", "ran", "age"],
            [
                [
                    entry.key.hex()[:16],
                    plain(entry.meta.name),
                    plain(entry.arguments()),
                    f"{entry.meta.size:,}",
                    format_duration(entry.meta.seconds),
                    format_duration(max(0.0, now - entry.time)),
                ]
                for entry in rows
            ],
        )


@durable.command()
@_directory
@json_option("an object: the result, what its key was made of, the nearest other and what differs")
@click.argument("key")
def why(directory: str | None, key: str, as_json: bool) -> None:
    """Explain KEY, or the newest result of the function KEY: what it was made of, and how the nearest other differs.

    KEY is the beginning of a key, as `hpcray durable ls` shows it, or the name of a function.
    """
    with _opened(directory) as store:
        if (entry := _find(store, key)) is None:
            raise click.ClickException(f"no result of the key or function {key!r} is kept in {store.path}")
        other = nearest(store, entry)
        if as_json:
            differs = list(compare(store, entry, other)) if other is not None else []
            found = {**_row(entry), "made_of": [" ".join(line.split()) for line in explain(store, entry)]}
            print_json({**found, "nearest": other.key.hex() if other is not None else None, "differs": differs})
            return
        for line in explain(store, entry):
            click.echo(plain(line))
        if other is None:
            click.echo("no other result of this function is kept")
            return
        click.echo(f"the nearest other result is {other.key.hex()[:16]}, of which differ:")
        for line in compare(store, entry, other):
            click.echo(f"  {plain(line)}")


@durable.command()
@_directory
@click.argument("names", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Remove all results.")
@click.option("--expired", is_flag=True, help="Remove those whose time has passed (DurableOptions(expires=)).")
@click.option("--older", type=_Age(), metavar="TIME", help="Remove those that are older, such as 30d.")
@click.option("--size", type=_Size(), metavar="SIZE", help="Remove the oldest, until the rest takes no more than this.")
@click.option("--dry-run", is_flag=True, help="Print what would go.")
@json_option("an object: the path, how many results are or would be removed, bytes that are free")
def rm(
    directory: str | None,
    names: tuple[str, ...],
    everything: bool,
    expired: bool,
    older: float | None,
    size: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove results: those of the functions NAMES, or with keys that begin so, or those that an option chooses.

    What a running job writes to is left as it is.
    """
    if not (names or everything or expired or older is not None or size is not None):
        raise click.UsageError("nothing is chosen; hint: a name, --older 30d, --size 20g, --expired or --all")
    with _opened(directory) as store:
        oldest = store.oldest_beyond(size) if size is not None else 0.0
        now = time.time()

        def gone(key: bytes, place: RecordPlace, meta: Meta) -> bool:
            if everything:
                return True
            if place.kind == FUNCTION:
                return False
            return (
                meta.name in names
                or any(len(name) >= 8 and key.hex().startswith(name) for name in names)
                or (expired and 0 < meta.expires < now)
                or (older is not None and place.time < now - older)
                or place.time < oldest
            )

        removed, freed = (_count(store, gone), 0) if dry_run else store.remove(gone)
        if as_json:
            print_json({"path": store.path, "removed": removed, "bytes": freed, "dry_run": dry_run})
        elif dry_run:
            click.echo(f"{removed:,} results would go from {store.path}")
        else:
            click.echo(f"{removed:,} results are removed from {store.path}, {format_size(freed)} are free")


def _count(store: ResultStore, gone: Callable[[bytes, RecordPlace, Meta], bool]) -> int:
    found = 0
    for key, place in store.entries():
        entry = read_entry(store, key, place)
        found += entry is not None and gone(key, place, entry.meta)
    return found


@contextlib.contextmanager
def _opened(directory: str | None) -> Iterator[ResultStore]:
    """The directory, looked through."""
    variable = "HPCRAY_DURABLE_DIR"
    chosen = directory or os.environ.get(variable) or configured_environment(os.environ).get(variable, "")
    path = state_directory(chosen)
    try:
        store = ResultStore(path, make=False)
    except FileNotFoundError:
        raise click.ClickException(f"{path}: no results are kept there") from None
    except PermissionError as error:
        raise click.ClickException(str(error)) from None
    try:
        gc.disable()  # it would go through a million entries again and again, in a command that ends soon
        store.refresh()
        yield store
    finally:
        store.close()


def _find(store: ResultStore, text: str) -> Entry | None:
    newest: Entry | None = None
    for key, place in store.entries():
        if place.kind == FUNCTION or (newest is not None and place.time <= newest.time):
            continue
        entry = read_entry(store, key, place)
        if entry is not None and (entry.meta.name == text or (len(text) >= 4 and key.hex().startswith(text))):
            newest = entry
    return newest


def _row(entry: Entry) -> dict[str, str | float | int]:
    return {
        "key": entry.key.hex(),
        "function": entry.meta.name,
        "arguments": entry.arguments(),
        "bytes": entry.meta.size,
        "seconds": entry.meta.seconds,
        "time": entry.time,
    }


class Entry(NamedTuple):
    """A kept result, without its value."""

    key: bytes
    time: float
    kind: int
    meta: Meta

    def arguments(self) -> str:
        """The arguments as text; of large ones their digests."""
        return ", ".join(f"{name}={show_argument(content)}" for name, content in self.meta.arguments)


def read_entry(store: ResultStore, key: bytes, place: RecordPlace) -> Entry | None:
    """Return the entry of a key; None if it is damaged."""
    record = store.read(key, place, values=False)
    return Entry(key, record.header.time, record.header.kind, record.meta) if record is not None else None


def explain(store: ResultStore, entry: Entry) -> Iterator[str]:
    """Yield lines: everything that the key of a result was made of."""
    kind = "the end of a stream" if entry.kind == STREAM_END else "a result"
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time))
    yield f"key        {entry.key.hex()}"
    meta = entry.meta
    yield f"function   {meta.name}, {kind} of {meta.size:,} bytes, made {made} in {meta.seconds:.3g} s"
    for name, content in entry.meta.arguments:
        yield f"argument   {name} = {show_argument(content)}"
    if (description := describe(store, entry.meta.function)) is None:
        yield f"           the description of its function, {entry.meta.function.hex()[:16]}, is not kept"
        return
    for name, value in description.settings:
        if value:
            yield f"setting    {name} = {value}"
    for label, mark in description.parts:
        yield f"part       {label}: {_show_mark(label, mark)}"
    for module, version in entry.meta.versions:
        yield f"needs      {module}: {version}"
    for module, name, mark in entry.meta.needs:
        yield f"needs      {module}.{name}: {mark.hex()[:16]}"


def nearest(store: ResultStore, entry: Entry) -> Entry | None:
    """Return the result of a function of the same name whose key has most in common with that of another one."""
    best: tuple[int, float] | None = None
    found: Entry | None = None
    own = dict(entry.meta.arguments)
    descriptions: dict[bytes, int] = {}
    for key, place in store.entries():
        if key == entry.key or place.kind == FUNCTION:
            continue
        other = read_entry(store, key, place)
        if other is None or other.meta.name != entry.meta.name or other.kind != entry.kind:
            continue
        theirs = dict(other.meta.arguments)
        distance = sum(own.get(name) != theirs.get(name) for name in {*own, *theirs})
        function = other.meta.function
        if function not in descriptions:
            descriptions[function] = len(list(_differences(store, entry.meta.function, function)))
        rank = distance + descriptions[function], -other.time
        if best is None or rank < best:
            best, found = rank, other
    return found


def compare(store: ResultStore, one: Entry, other: Entry) -> Iterator[str]:
    """Yield lines: what differs between the keys of two results."""
    own, theirs = dict(one.meta.arguments), dict(other.meta.arguments)
    for name in sorted({*own, *theirs}):
        if own.get(name) != theirs.get(name):
            shown = [show_argument(side[name]) if name in side else "none" for side in (own, theirs)]
            yield f"argument {name}: {shown[0]}, there {shown[1]}"
    yield from _differences(store, one.meta.function, other.meta.function)


def describe(store: ResultStore, function: bytes) -> Description | None:
    """Return what all keys of a function are made of; None where that is not kept."""
    place = store.find(function)
    record = store.read(function, place) if place is not None else None
    if record is None or record.header.kind != FUNCTION:
        return None
    return decode_description(record.data)


def _differences(store: ResultStore, one: bytes, other: bytes) -> Iterator[str]:
    if one == other:
        return
    own, theirs = describe(store, one), describe(store, other)
    if own is None or theirs is None:
        yield "the function, or what it names"
        return
    settings, their_settings = dict(own.settings), dict(theirs.settings)
    for name in settings:
        if settings[name] != their_settings.get(name):
            yield f"setting {name}: {settings[name] or 'none'}, there {their_settings.get(name) or 'none'}"
    parts, their_parts = dict(own.parts), dict(theirs.parts)
    for label in sorted({*parts, *their_parts}):
        if parts.get(label) != their_parts.get(label):
            shown = [_show_mark(label, side[label]) if label in side else "none" for side in (parts, their_parts)]
            yield f"{label}: {shown[0]}, there {shown[1]}"


def _show_mark(label: str, mark: bytes) -> str:
    return mark.decode(errors="replace") if label.startswith("package ") else mark.hex()[:16]


def show_argument(content: bytes) -> str:
    """Return an argument's canonical bytes as text, if they are those of a number or a short text."""
    tag, rest = content[:1], content[4:]
    if tag == b"f" and len(content) == 9:
        return repr(struct.unpack("<d", content[1:])[0])
    if tag == b"i":
        return rest.decode(errors="replace")
    if tag == b"s":
        return repr(rest.decode(errors="replace"))
    if tag == b"b":
        return repr(rest)
    if tag in (b"%", b"="):
        with contextlib.suppress(ValueError, EOFError, TypeError):
            # Of a record whose check was right, in a directory of this user's.
            return repr(marshal.loads(content[1 if tag == b"%" else 5 :]))
    if tag == b"@":
        return f"the result {content[2:10].hex()}" if content[1:2] == b"K" else f"a value {content[2:10].hex()}"
    return f"#{content[1:9].hex()}"
