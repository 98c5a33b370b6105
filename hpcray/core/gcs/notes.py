"""Which rows of the head's tables have changed: what the journal has still to write."""

from __future__ import annotations

SESSION, NODE, ENDED, SPEC, ACTOR, WATCH, KILLED, FORGOTTEN, GROUP, GROUP_WATCH, GONE, VALUE, ANSWER = range(13)
"""The tables. SESSION: its name, and the job; NODE: by index; ENDED: processes that are dead; SPEC, ACTOR: what an
actor is, how it is; WATCH: actor and who watches it; KILLED: actors killed before they were known; FORGOTTEN: dead
actors that are known no more; GROUP, GROUP_WATCH: placement groups; GONE: ids of those that are no more; VALUE: the
key-value store; ANSWER: to questions that have changed something."""


class Notes:
    """Keys of rows that were made, changed or deleted since they were taken last. Nothing is noted until `on`.

    Attributes:
        count: how many changes there have been.
    """

    def __init__(self) -> None:
        self.on = False
        self.count = 0
        self._dirty: dict[tuple[int, bytes], None] = {}

    def __bool__(self) -> bool:
        return bool(self._dirty)

    def add(self, table: int, key: bytes) -> None:
        """This row is not what it was."""
        if self.on:
            self._dirty[table, key] = None
            self.count += 1

    def take(self) -> list[tuple[int, bytes]]:
        """What was noted, in the order of the first changes."""
        dirty, self._dirty = self._dirty, {}
        return list(dirty)
