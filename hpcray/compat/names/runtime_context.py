"""`ray.runtime_context`."""

from hpcray.api.context import get_runtime_context
from hpcray.api.runtime_context import RuntimeContext

__all__ = ["RuntimeContext", "get_runtime_context"]
