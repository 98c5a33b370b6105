"""`ray._private.ray_logging`: level and format of Ray's logger."""

from __future__ import annotations

import logging
import re

NUMBERS = re.compile(r"(\d+|0x[0-9a-fA-F]+)")
"""Parts of a line in which lines that mean the same differ."""


def setup_logger(logging_level: int | str, logging_format: str) -> None:
    """Set the level of Ray's logger, and the format of its handlers unless that is ""."""
    logger = logging.getLogger("ray")
    for handler in logger.handlers if logging_format else ():
        handler.setFormatter(logging.Formatter(logging_format))
    logger.setLevel(logging_level.upper() if isinstance(logging_level, str) else logging_level)
