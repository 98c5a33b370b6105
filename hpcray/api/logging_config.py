"""`LoggingConfig`: the log lines of a job."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hpcray.platform.log_format import FORMATTERS, STANDARD_ATTRIBUTES
from hpcray.runtime.worker.log_context import log_as


@dataclass
class LoggingConfig:
    """Format and level of the root loggers of the driver and its workers, for `init(logging_config=...)`.

    Args:
        encoding: "TEXT", or "JSON" for one object per line. Both contain job, node, worker, task and actor.
        log_level: lowest level that is written, a level name of `logging`.
        additional_log_standard_attrs: further attributes of log records to write.

    Raises:
        ValueError: the encoding, the level or an attribute is unknown.
    """

    encoding: str = "TEXT"
    log_level: str = "INFO"
    additional_log_standard_attrs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.encoding not in FORMATTERS:
            raise ValueError(f"Invalid encoding type: {self.encoding}. Valid encoding types are: {list(FORMATTERS)}")
        level: Any = self.log_level
        if not isinstance(level, int) and not isinstance(logging.getLevelName(level), int):
            raise ValueError(f"Unknown level: {self.log_level!r}; hint: DEBUG, INFO, WARNING, ERROR or CRITICAL")
        for attribute in self.additional_log_standard_attrs:
            if attribute not in STANDARD_ATTRIBUTES:
                raise ValueError(
                    f"Unknown python logging standard attribute: {attribute}. The valid attributes are: "
                    f"{set(STANDARD_ATTRIBUTES)}"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict of JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> LoggingConfig:
        """Make one of a mapping of fields; what is no field is left out."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in d.items() if name in known})

    def _apply(self) -> None:
        """Configure the loggers of this process."""
        log_as(self.to_dict())

    _configure_logging = _apply
