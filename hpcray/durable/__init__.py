"""Results of tasks that outlive their job (docs/how-to/durable.md)."""

from hpcray.durable.options import DurableOptions

__all__ = ["DurableOptions"]
