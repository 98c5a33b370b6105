"""The short forms in which launchers and batch systems write nodes and numbers, and their long forms."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_PART = re.compile(r"([^\[\],]*)(?:\[([^\]]*)\])?")
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_NUMBERED = re.compile(r"(.*?)(\d+)")
_MOST_NODES = 1 << 20


def expand_nodes(text: str) -> tuple[str, ...]:
    """`n[1-3,7],gpu[01-04]` as `n1 n2 n3 n7 gpu01 …`, in order; several brackets in one name are allowed.

    Raises:
        ValueError: it is not a list of nodes; the message shows it.
    """
    found: list[str] = []
    for word in _words(text):
        found += _expand_word(word, text)
        if len(found) > _MOST_NODES:
            raise ValueError(f"{text[:200]!r} names more than {_MOST_NODES} nodes")
    return tuple(found)


def compress_nodes(nodes: Iterable[str]) -> str:
    """`n1 n2 n3 n7 x` as `n[1-3,7],x`: the way back, for people to read. Sorted; numbers at the end only."""
    groups: dict[tuple[str, int], list[int]] = {}
    alone = []
    for node in set(nodes):
        match = _NUMBERED.fullmatch(node)
        if match is None:
            alone.append(node)
        else:
            groups.setdefault((match[1], len(match[2]) if match[2].startswith("0") else 0), []).append(int(match[2]))
    found = list(alone)
    for (name, width), numbers in groups.items():
        runs: list[list[int]] = []
        for number in sorted(numbers):
            if runs and number == runs[-1][1] + 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        texts = [f"{a:0{width}d}" if a == b else f"{a:0{width}d}-{b:0{width}d}" for a, b in runs]
        found.append(f"{name}{texts[0]}" if len(numbers) == 1 else f"{name}[{','.join(texts)}]")
    return ",".join(sorted(found))


def expand_counts(text: str) -> tuple[int, ...]:
    """`16(x2),8` as (16, 16, 8): one number per node.

    Raises:
        ValueError: it is not such a list.
    """
    found: list[int] = []
    for word in filter(None, text.split(",")):
        match = _REPEATED.fullmatch(word.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a list of numbers such as 16(x2),8")
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


def parse_hostfile(text: str) -> tuple[tuple[str, int], ...]:
    """Hosts and slots of a hostfile, in order, a host that is named again counted up.

    Takes `host`, `host slots=4` (Open MPI), `host:4` (MPICH) and one line per slot (PBS).
    """
    slots: dict[str, int] = {}
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        host, _, number = words[0].partition(":")
        given = [word.removeprefix("slots=") for word in words[1:] if word.startswith("slots=")]
        count = (given or [number])[0]
        slots[host] = slots.get(host, 0) + (int(count) if count.isdecimal() else 1)
    return tuple(slots.items())


def _words(text: str) -> Iterator[str]:
    """The parts between commas that stand outside brackets."""
    depth = start = 0
    for index, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise ValueError(f"{text!r} is not a list of nodes: its brackets do not match")
        if letter == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    if depth:
        raise ValueError(f"{text!r} is not a list of nodes: its brackets do not match")
    yield text[start:]


def _expand_word(word: str, text: str) -> list[str]:
    names = [""]
    for match in _PART.finditer(word.strip()):
        ends = [match[1]] if match[2] is None else [match[1] + number for number in _numbers(match[2], text)]
        names = [name + end for name in names for end in ends]
    return [name for name in names if name]


def _numbers(ranges: str, text: str) -> Iterator[str]:
    """`01-03,7` as `01 02 03 7`: the first number's width is kept."""
    for part in ranges.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or int(last) - int(first) > _MOST_NODES:
            raise ValueError(f"{text!r} is not a list of nodes: {part!r} is no range")
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"
