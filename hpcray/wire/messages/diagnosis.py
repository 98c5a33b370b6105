"""Messages of diagnosis: what a process or raylet does now, what it holds, whom to end when memory is short."""

from __future__ import annotations

from msgspec import Struct


class Ask(Struct, array_like=True, tag=180):
    """p→any p or r: a question about yourself. what: see `runtime.answers` (processes) and `runtime.node_answers`
    (raylets); args: msgpack. Answer: GcsReply(req)."""

    req: int
    what: str
    args: bytes = b""


class AskRetries(Struct, array_like=True, tag=181):
    """r→holder of leases: memory is short. What do these workers of mine run for you? Answer: Retries."""

    number: int
    workers: list[bytes]


class Retries(Struct, array_like=True, tag=182):
    """holder→r. One row per worker: its proc id, the name of the task that it runs, whether that may run again."""

    number: int
    rows: list[tuple[bytes, str, bool]]
