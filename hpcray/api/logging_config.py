"""`init(logging_config=LoggingConfig(...))`: how the driver and its workers log."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcray.host.log_format import ENCODINGS, STANDARD


@dataclass
class LoggingConfig:
    """How the root loggers of a job's processes write.

    Args:
        encoding: "TEXT", or "JSON" for one object per line; both say job, node, worker, task and actor.
        log_level: from which on, a name of `logging`.
        additional_log_standard_attrs: attributes of log records that are written beside the usual ones.

    Raises:
        ValueError: the encoding or the level is unknown, or an attribute is none of a log record.
    """

    encoding: str = "TEXT"
    log_level: str = "INFO"
    additional_log_standard_attrs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.encoding not in ENCODINGS:
            raise ValueError(f"Invalid encoding type: {self.encoding}. Valid encoding types are: {list(ENCODINGS)}")
        if not isinstance(self.log_level, str) or not isinstance(logging.getLevelName(self.log_level), int):
            raise ValueError(f"Unknown level: {self.log_level!r}; hint: DEBUG, INFO, WARNING, ERROR or CRITICAL")
        for attribute in self.additional_log_standard_attrs:
            if attribute not in STANDARD:
                raise ValueError(
                    f"Unknown python logging standard attribute: {attribute}. The valid attributes are: "
                    f"{sorted(STANDARD)}"
                )

    def to_dict(self) -> dict[str, Any]:
        """As JSON can have it."""
        return asdict(self)
