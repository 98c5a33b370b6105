"""`ray._private.utils` and `ray._common.utils`."""

from __future__ import annotations

import asyncio
import binascii
import inspect
import os
from typing import Any

from hpcray.platform import resource_limits
from hpcray.platform.session_directory import session_root


def get_ray_temp_dir() -> str:
    """Return the directory of this user's session directories on this node."""
    return session_root(os.environ)


def get_user_temp_dir() -> str:
    """Return the directory for temporary files, the parent of `get_ray_temp_dir()`."""
    return os.path.dirname(session_root(os.environ))


def get_system_memory() -> int:
    """Return the memory that this node may use, in bytes."""
    return int(resource_limits.usable_memory())


def get_num_cpus() -> int:
    return int(resource_limits.cpus_per_rank(1))


hex_to_binary = binascii.unhexlify
is_async_func = inspect.iscoroutinefunction


def binary_to_hex(data: bytes) -> str:
    return data.hex()


def decode(text: Any, allow_none: bool = False, encode_type: str = "utf-8") -> str:
    """Decode bytes as text; text is returned unchanged."""
    if text is None and allow_none:
        return ""
    return text.decode(encode_type) if isinstance(text, bytes) else str(text)


def get_or_create_event_loop() -> asyncio.AbstractEventLoop:
    """Return this thread's running event loop, else its current one, else a new one that becomes the current."""
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
