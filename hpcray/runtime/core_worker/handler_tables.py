"""Handlers of the messages that a core worker gets, bound one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Handler = Callable[[bytes, Any], None]
"""Called with (source, message)."""
HandlerTable = tuple[Any, Mapping[type, Callable[[Any], Handler]]]
"""An object, and its handlers by message: each entry binds its handler to the object."""


class BoundHandlers(dict[type, Handler]):
    """The handlers of one process, by message. A handler is bound to its object when its first message comes.

    A new worker gets few kinds of messages; binding all of them would copy the page of each function and of each
    message class that the forked process shares with its template.
    """

    def __init__(self, *tables: HandlerTable) -> None:
        """tables: where several have a message, the last one counts."""
        super().__init__()
        self._tables = tables

    def __missing__(self, kind: type) -> Handler:
        for target, table in reversed(self._tables):
            if (bind := table.get(kind)) is not None:
                handler = self[kind] = bind(target)
                return handler
        raise KeyError(kind)
