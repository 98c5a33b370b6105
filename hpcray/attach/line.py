"""One end of a line: numbered records over a pipe that may break and be replaced. It has no clock and no descriptor.

    kind u8 | 3 bytes | length u32 (of what follows) | number u64 | acknowledged u64 | payload

Payloads are numbered in the order in which they leave, and kept until the other end has acknowledged them. Where a pipe
breaks, the ends exchange over the next one what has arrived, and what has not is sent once more: so each payload
arrives once, in order, however often the pipe breaks.

There are two classes of traffic. *Urgent* payloads leave first. *Transfers* are made piece by piece while they leave,
in turn with each other; of these so little is on its way at a time that it arrives within about `TARGET_DELAY`, so that
an urgent payload behind them does not wait for longer, whatever buffers the pipe has.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator

HEADER = struct.Struct("<B3xIQQ")
DATA, ACK, PING, RESUME, BYE = range(5)
PIECE = 256 << 10
"""Bytes of one piece of a transfer."""
TARGET_DELAY = 0.15
"""Seconds within which a piece of a transfer should be acknowledged."""
SMALLEST_WINDOW, LARGEST_WINDOW = 2 * PIECE, 64 * PIECE
"""Bytes of transfers that may be on their way."""
MOST_URGENT = 16 << 20
"""Bytes of urgent payloads that may be queued or on their way, before their source has to wait."""
ACK_BYTES, ACK_DELAY = 64 << 10, 0.04
"""Bytes, and seconds, after which what has come is acknowledged, if nothing is to be sent that could say so along the
way. An answer that follows a small acknowledgement at once would wait for TCP's: 40 ms."""
HEARTBEAT = 1.0
"""Seconds after which an end that has sent nothing says that it lives."""
SILENCE = 10.0
"""Seconds without a byte after which an end takes the pipe for broken."""
_LARGEST_RECORD = 1 << 30


class LineError(Exception):
    """The bytes that have come through the pipe are no record of the other end."""


class Transfer:
    """A long value on its way.

    Args:
        channel: what `ResumableLine.drop_channel` withdraws it by.
        pieces: makes the payloads, one by one, when each is about to leave.
        after: payloads that follow the last piece; more may be added while the transfer is not `ended`.
    """

    __slots__ = ("after", "channel", "ended", "pieces")

    def __init__(self, channel: int, pieces: Iterator[bytes], after: list[bytes]) -> None:
        self.channel, self.pieces, self.after = channel, pieces, deque(after)
        self.ended = False

    def next_piece(self) -> bytes | None:
        """Return the next payload; None: there is none, and the transfer has ended."""
        piece = next(self.pieces, None)
        if piece is None and self.after:
            piece = self.after.popleft()
        self.ended = piece is None
        return piece


class ResumableLine:
    """The state of one end.

    Attributes:
        received: number of the last payload that has arrived in order.
        connected: there is a pipe, and the other end has said over it what it has received.
        holds_back: arrived payloads are not acknowledged, as this end cannot pass them on at present; the other end
            sends no more than its windows then.
        ended: the other end has said that the line is not needed any more.
    """

    def __init__(self) -> None:
        self.received = 0
        self.connected = False
        self.holds_back = False
        self.ended = False
        self._acknowledged_to_peer = 0
        self._sent = 0
        self._unacknowledged: deque[tuple[int, bytes, bool, float]] = deque()
        self._again: deque[tuple[int, bytes, bool]] = deque()
        self._urgent: deque[bytes] = deque()
        self._transfers: deque[Transfer] = deque()
        self._urgent_bytes = self._transfer_bytes = 0
        self.window = SMALLEST_WINDOW
        self._may_shrink_at = 0.0
        self._input = bytearray()
        self._last_heard = self._last_sent = 0.0
        self._owed, self._owed_since = 0, 0.0  # bytes that have come, and are not acknowledged
        self._resume_due = False

    # ------------------------------------------------------------ what is to be sent

    def send(self, payload: bytes) -> None:
        """Queue an urgent payload."""
        self._urgent.append(payload)
        self._urgent_bytes += len(payload)

    def transfer(self, transfer: Transfer) -> None:
        """Queue a transfer."""
        self._transfers.append(transfer)

    def drop_channel(self, channel: int) -> None:
        """Withdraw what has not left of the transfers of a channel."""
        self._transfers = deque(found for found in self._transfers if found.channel != channel)

    @property
    def is_full(self) -> bool:
        """True if no more urgent payloads should be queued for now."""
        return self._urgent_bytes >= MOST_URGENT

    @property
    def is_settled(self) -> bool:
        """True if all that was queued has arrived."""
        return not (self._urgent or self._transfers or self._unacknowledged)

    # ------------------------------------------------------------ pipes

    def pipe_opened(self, now: float) -> None:
        """There is a new pipe: nothing but RESUME goes over it until the other end's RESUME has come."""
        self.connected = False
        self._input.clear()
        self._last_heard = self._last_sent = now
        self._resume_due = True

    def pipe_lost(self) -> None:
        """The pipe is broken."""
        self.connected = False
        self._resume_due = False
        self._input.clear()

    def is_silent(self, now: float) -> bool:
        """True if nothing has come for so long that the pipe must be broken."""
        return now - self._last_heard > SILENCE

    def next_look(self, now: float) -> float:
        """Return in how many seconds `take` and `is_silent` have to be called again, if nothing comes before."""
        due = min(self._last_sent + HEARTBEAT, self._last_heard + SILENCE)
        if self._owed and not self.holds_back:
            due = min(due, self._owed_since + ACK_DELAY)
        return max(0.0, due - now) + 0.001

    # ------------------------------------------------------------ bytes out

    def take(self, now: float, room: int) -> list[bytes]:
        """Return what is to be written to the pipe now.

        Args:
            room: about how many bytes; one payload may exceed it.
        """
        out: list[bytes] = []
        if self._resume_due:
            self._resume_due = False
            out.append(HEADER.pack(RESUME, 0, 0, self.received))
            self._last_sent = now
        if not self.connected:
            return out
        while room > 0:
            record = self._next_record(now)
            if record is None:
                break
            out += record
            room -= len(record[1]) + HEADER.size
        if out:
            self._note_ack()
        elif self._owed and not self.holds_back and self._is_ack_due(now):
            out.append(HEADER.pack(ACK, 0, 0, self._note_ack()))
        elif now - self._last_sent >= HEARTBEAT:
            out.append(HEADER.pack(PING, 0, 0, self._note_ack()))
        if out:
            self._last_sent = now
        return out

    def _is_ack_due(self, now: float) -> bool:
        return self._owed >= ACK_BYTES or now - self._owed_since >= ACK_DELAY

    def bye(self) -> bytes:
        """Return the record that says that this line is not needed any more."""
        return HEADER.pack(BYE, 0, 0, self._note_ack())

    def _next_record(self, now: float) -> tuple[bytes, bytes] | None:
        if self._again:
            number, payload, is_piece = self._again.popleft()
        elif self._urgent:
            number, payload, is_piece = self._sent + 1, self._urgent.popleft(), False
        else:
            piece = self._next_piece() if self._transfers and self._transfer_bytes < self.window else None
            if piece is None:
                return None
            self._transfer_bytes += len(piece)
            number, payload, is_piece = self._sent + 1, piece, True
        self._sent = max(self._sent, number)
        self._unacknowledged.append((number, payload, is_piece, now))
        return HEADER.pack(DATA, len(payload), number, self._ack_number()), payload

    def _next_piece(self) -> bytes | None:
        while self._transfers:
            transfer = self._transfers.popleft()
            piece = transfer.next_piece()
            if piece is not None:
                self._transfers.append(transfer)
                return piece
        return None

    def _ack_number(self) -> int:
        return self._acknowledged_to_peer if self.holds_back else self.received

    def _note_ack(self) -> int:
        self._acknowledged_to_peer = self._ack_number()
        if not self.holds_back:
            self._owed = 0
        return self._acknowledged_to_peer

    # ------------------------------------------------------------ bytes in

    def feed(self, data: bytes | memoryview, now: float) -> list[bytes]:
        """Take what the pipe has brought; return the payloads that have arrived, in order.

        Raises:
            LineError: it is no record, or a payload is missing.
        """
        self._last_heard = now
        self._input += data
        found: list[bytes] = []
        view, at, end = memoryview(self._input), 0, len(self._input)
        try:
            while end - at >= HEADER.size:
                kind, length, number, acknowledged = HEADER.unpack_from(view, at)
                if kind > BYE or length > _LARGEST_RECORD or (length and kind != DATA):
                    raise LineError(f"a record of kind {kind} with {length} bytes")
                if end - at < HEADER.size + length:
                    break
                start = at + HEADER.size
                at = start + length
                if kind == RESUME:
                    self._resume(acknowledged)
                    continue
                self._acknowledge(acknowledged, now)
                if kind == BYE:
                    self.ended = True
                elif kind == DATA:
                    if not self._owed:
                        self._owed_since = now
                    self._owed += HEADER.size + length
                    if number > self.received + 1:
                        raise LineError(f"payload {number} has come, {self.received + 1} is missing")
                    if number == self.received + 1:
                        self.received = number
                        found.append(bytes(view[start:at]))
        finally:
            view.release()
        del self._input[:at]
        return found

    def _resume(self, received: int) -> None:
        """The other end says over a new pipe what it has received."""
        if received > self._sent:
            raise LineError(f"the other end has received {received} payloads of {self._sent}")
        again = {number: (number, payload, is_piece) for number, payload, is_piece in self._again}
        again |= {number: (number, payload, is_piece) for number, payload, is_piece, _ in self._unacknowledged}
        self._unacknowledged.clear()
        self._again.clear()
        for number in sorted(again):
            if number > received:
                self._again.append(again[number])
            else:
                self._arrived(again[number][1], again[number][2])
        self.connected = True

    def _acknowledge(self, number: int, now: float) -> None:
        kept = self._unacknowledged
        while kept and kept[0][0] <= number:
            _, payload, is_piece, sent_at = kept.popleft()
            self._arrived(payload, is_piece)
            if is_piece:
                self._adapt(now - sent_at, len(payload), now)

    def _arrived(self, payload: bytes, is_piece: bool) -> None:
        if is_piece:
            self._transfer_bytes -= len(payload)
        else:
            self._urgent_bytes -= len(payload)

    def _adapt(self, delay: float, size: int, now: float) -> None:
        """Choose how much of transfers may be on its way, from how long this piece was."""
        if delay <= TARGET_DELAY:
            if self._transfer_bytes + 2 * PIECE >= self.window:  # else it is not the window that limits
                self.window = min(LARGEST_WINDOW, self.window + size)
        elif now >= self._may_shrink_at:
            self.window = max(SMALLEST_WINDOW, self.window * 7 // 10)
            self._may_shrink_at = now + delay  # what is on its way still shows the larger window
