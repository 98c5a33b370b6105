"""Answers to questions that change something, kept so that a question asked twice is not done twice.

A process asks again when the head has moved: the answer may have gone down with the old head, after its change was
written down. A question is told by who asks and its number.
"""

from __future__ import annotations

from collections.abc import Callable

from hpcray.core.gcs import notes
from hpcray.core.gcs.notes import Notes
from hpcray.wire.messages import GcsCall, GcsReply

CHANGING = frozenset({"kv_put", "kv_del"})
_KEPT = 128
"""Answers of one process: as many as it may have threads that wait for one."""
_NUMBER = 8


class Answers:
    """The last ones of each process.

    Attributes:
        notes: which rows have changed, for the journal. Their keys: who asks, and the number.
    """

    def __init__(self) -> None:
        self.notes = Notes()
        self._given: dict[bytes, dict[int, bytes]] = {}

    def once(self, src: bytes, call: GcsCall, answer: Callable[[GcsCall], GcsReply]) -> GcsReply:
        """What `answer` says, or has said to the same question."""
        if call.method not in CHANGING:
            return answer(call)
        mine = self._given.setdefault(src, {})
        known = mine.get(call.req)
        if known is not None:
            return GcsReply(call.req, True, known)
        reply = answer(call)
        if reply.ok:
            mine[call.req] = reply.value
            self.notes.add(notes.ANSWER, _key(src, call.req))
            if len(mine) > _KEPT:
                self._drop(src, next(iter(mine)))
        return reply

    def forget(self, proc: bytes) -> None:
        """It asks no more."""
        for number in list(self._given.get(proc, ())):
            self._drop(proc, number)
        self._given.pop(proc, None)

    def row(self, key: bytes) -> bytes | None:
        """The answer of a row, by its key."""
        return self._given.get(key[:-_NUMBER], {}).get(int.from_bytes(key[-_NUMBER:], "big"))

    def row_keys(self) -> list[bytes]:
        """The keys of all rows."""
        return [_key(src, number) for src, given in self._given.items() for number in given]

    def adopt(self, key: bytes, value: bytes) -> None:
        """Take in a row that another head has had; in the order in which it had them."""
        self._given.setdefault(key[:-_NUMBER], {})[int.from_bytes(key[-_NUMBER:], "big")] = value

    def _drop(self, src: bytes, number: int) -> None:
        del self._given[src][number]
        self.notes.add(notes.ANSWER, _key(src, number))


def _key(src: bytes, number: int) -> bytes:
    return src + number.to_bytes(_NUMBER, "big")
