"""Files that only this user can read, and that others see whole or not at all."""

from __future__ import annotations

import os


def write_private_file(path: str, data: bytes) -> None:
    """Write a file of mode 0600, or replace it."""
    temporary = f"{path}.{os.getpid()}.new"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
    os.replace(temporary, path)
