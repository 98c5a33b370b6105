"""The first and only message of a raylet to the process that started it."""

from __future__ import annotations

import msgspec


class RayletReady(msgspec.Struct):
    """The one message of a raylet child on its ready pipe: its session directory, or why it could not start."""

    session_dir: str = ""
    error: str = ""
    reported_by_rank0: bool = False
