"""What a process gave back to a neighbour's store, as long as nothing tells that it has come there.

A connection that ends while both live takes with it what is on it; what was to be given back is said again then, on
another way. An answer to an Open tells that all has come that was said before it.
"""

from __future__ import annotations

from hpcray.wire.messages import DiskRead, Message, Release


class Unheard:
    """Of one neighbour's store."""

    def __init__(self) -> None:
        self._mark = b""  # an object that we asked for, and what was given back before that; then what was since
        self._before: dict[bytes, bool] = {}
        self._since: dict[bytes, bool] = {}

    def gave(self, msg: Message) -> None:
        """This was said; only a Release and a DiskRead give something back."""
        if isinstance(msg, Release):
            self._since.update(dict.fromkeys(msg.ids, False))
        elif isinstance(msg, DiskRead):
            self._since[msg.id] = True

    def asked(self, oid: bytes) -> None:
        """An Open was said."""
        if not self._mark:
            self._mark = oid
            self._before, self._since = self._since, {}

    def answered(self, oid: bytes) -> None:
        """It has come."""
        self._since.pop(oid, None)
        self._before.pop(oid, None)
        if self._mark == oid:
            self._mark = b""
            self._before = {}

    def again(self) -> list[Message]:
        """What is to be said on another way."""
        given = {**self._before, **self._since}
        pins = [oid for oid, file in given.items() if not file]
        files: list[Message] = [DiskRead(oid) for oid, file in given.items() if file]
        return [Release(pins), *files] if pins else files
