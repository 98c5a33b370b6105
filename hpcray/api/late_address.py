"""The address of a cluster that its program is still composing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class LateAddress(str):
    """Address of a cluster of this interpreter, whose nodes start when they are needed.

    `init(address=...)` with it postpones the start to the first use of the session. Its text is for others (a program
    that this one starts, a variable of the environment): a call that reads the text starts the nodes.

    Attributes:
        newest: the address that `init()` without an argument takes; None for none.
        text: starts the nodes unless they run, and returns the address as plain text.
        started: returns True if the nodes run.
    """

    newest: ClassVar[LateAddress | None] = None
    text: Callable[[], str]
    started: Callable[[], bool]

    def __new__(cls, text: Callable[[], str], started: Callable[[], bool]) -> LateAddress:
        made = super().__new__(cls, f"cluster-{id(text):x}")
        made.text = text
        made.started = started
        return made

    def __str__(self) -> str:
        return self.text()

    def __format__(self, spec: str) -> str:
        return format(self.text(), spec)

    def __add__(self, other: str) -> str:
        return self.text() + other

    def __radd__(self, other: str) -> str:
        return other + self.text()

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        """Return the text as bytes; variables of the environment and command lines are made this way."""
        return self.text().encode(encoding, errors)

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.text(),)
