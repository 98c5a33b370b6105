"""`ray.util.debug`: say something once."""

from hpcray.compat.names.debug import (
    disable_log_once_globally,
    enable_periodic_logging,
    log_once,
    reset_log_once,
)

__all__ = ["disable_log_once_globally", "enable_periodic_logging", "log_once", "reset_log_once"]
