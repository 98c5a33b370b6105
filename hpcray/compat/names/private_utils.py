"""`ray._private.utils` and `ray._common.utils`."""

from __future__ import annotations

import asyncio
import binascii
import inspect
import os
from typing import Any

from hpcray.host import probe
from hpcray.host.session import session_root

__all__ = [
    "binary_to_hex",
    "decode",
    "get_num_cpus",
    "get_or_create_event_loop",
    "get_ray_temp_dir",
    "get_system_memory",
    "get_user_temp_dir",
    "hex_to_binary",
    "is_async_func",
]


def get_ray_temp_dir() -> str:
    """The directory that holds the session directories of this user on this node."""
    return session_root(os.environ)


def get_user_temp_dir() -> str:
    """The directory for temporary files that the session directories are in."""
    return os.path.dirname(session_root(os.environ))


def get_system_memory() -> int:
    """Bytes of memory that this node may use."""
    return int(probe.usable_memory())


def get_num_cpus() -> int:
    """CPUs of this node."""
    return int(probe.cpus_per_rank(1))


def hex_to_binary(text: str | bytes) -> bytes:
    """The bytes of a hex text."""
    return binascii.unhexlify(text)


def binary_to_hex(data: bytes) -> str:
    """The hex text of bytes."""
    return data.hex()


def decode(text: Any, allow_none: bool = False, encode_type: str = "utf-8") -> str:
    """Bytes as text; text as it is."""
    if text is None and allow_none:
        return ""
    return text.decode(encode_type) if isinstance(text, bytes) else str(text)


def get_or_create_event_loop() -> asyncio.AbstractEventLoop:
    """The running loop of this thread, or its current one, or a new one that becomes it."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        pass
    try:
        return asyncio.get_event_loop_policy().get_event_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop


def is_async_func(func: Any) -> bool:
    """Whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(func)
