"""Sizes in bytes as people write them: the same spellings in every option and variable."""

from __future__ import annotations

import math
import re

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes in a size such as `512m`, `2g`, `1.5GiB`, `1000000` or `1e9`; units are powers of 1024, as in Slurm.

    Raises:
        ValueError: `text` is not a positive size.
    """
    match = _SIZE.fullmatch(text.strip())
    size = math.floor(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if size <= 0:
        raise ValueError(f"{text!r} is not a size; hint: write 2g, 512m or a number of bytes")
    return size
