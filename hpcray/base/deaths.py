"""How a process died, as far as its error depends on it. The words travel from its raylet to whoever used it."""

from __future__ import annotations

LOW_MEMORY = "Task was killed due to the node running low on memory."
"""What the reason of a death begins with that a node's memory watcher brought about."""


def out_of_memory(reason: str) -> str:
    """What the memory watcher said of a death; "" when it was another's doing."""
    _, mark, told = reason.partition(LOW_MEMORY)
    return mark + told
