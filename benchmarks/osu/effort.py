"""How much is measured: all sizes thoroughly, or a few of them in less than a minute."""

from __future__ import annotations

from dataclasses import dataclass

LARGEST = 256 << 20
HUNDRED_KB = 100_000


@dataclass(frozen=True)
class Effort:
    """What one run measures.

    Attributes:
        sizes: bytes of the messages and objects.
        budget: bytes that one latency figure may move.
        messages: most messages of one latency figure.
        in_flight: bytes of a window of one bandwidth figure.
        repeats: windows of which the best counts.
    """

    sizes: tuple[int, ...]
    budget: int
    messages: int
    in_flight: int
    repeats: int


FULL = Effort(tuple(sorted([*(1 << power for power in range(3, 29)), HUNDRED_KB])), 1 << 30, 1000, LARGEST, 5)
QUICK = Effort((8, 4096, HUNDRED_KB, 128 << 10, 1 << 20, 8 << 20, 64 << 20), 1 << 28, 200, 128 << 20, 5)


def effort(words: list[str]) -> Effort:
    """What the command line of a part asks for: `--quick`, or everything."""
    return QUICK if "--quick" in words else FULL


def place(number: int, size: int, arena: int = LARGEST) -> int:
    """Where message `number` of a window lies: each in a place of its own, as objects do, while there are places."""
    return number % max(1, arena // size) * size
