"""HTML for notebooks: what this process knows of a ref, an actor or a function. Nothing is fetched, and
no other process is asked.
"""

from __future__ import annotations

import html
import inspect
from collections.abc import Mapping
from typing import Any

from hpcray.core.core_worker.object_entry import INLINE, PENDING, STORED
from hpcray.core.object_store.allocator import format_size
from hpcray.protocol.messages.objects import is_error
from hpcray.runtime.core_worker.context import current

_LONGEST_DOC = 500  # characters


def table(title: str, rows: Mapping[str, object]) -> str:
    """A table of two columns, without the rows that say nothing."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(str(value))}</td></tr>"
        for name, value in rows.items()
        if value not in ("", None)
    )
    return f"<div><b>{html.escape(title)}</b><table>{cells}</table></div>"


def ref_html(ref: Any) -> str:
    """An ObjectRef: whether its object is ready, where it is and what makes it."""
    process = current.process
    entry = process.table.entries.get(ref._id) if process is not None else None
    rows: dict[str, object] = {"id": ref.hex()}
    if entry is None:
        rows["state"] = "not of this session"
        return table("ObjectRef", rows)
    task, nodes = entry.task, entry.nodes
    rows["made by"] = getattr(task, "name", "")
    if entry.state == PENDING:
        rows["state"] = "not ready"
    elif entry.state == INLINE:
        rows["state"] = "an error; get() raises it" if is_error(entry.value) else "ready"
        rows["size"] = format_size(len(entry.value))
    elif entry.state == STORED:
        rows["state"] = "ready"
        rows["size"] = format_size(entry.size) if entry.size else ""
        rows["on"] = ", ".join(f"node {node}" for node in nodes or ())
    else:
        rows["state"] = "freed"
    return table("ObjectRef", rows)


def actor_html(handle: Any) -> str:
    """An actor's handle: its state as this process has last heard, and its methods."""
    process: Any = current.process
    client = process.submitter.actors._clients.get(handle._actor) if process is not None else None
    rows: dict[str, object] = {"id": handle._actor.hex()}
    if client is not None:
        rows["state"] = client.state
        rows["reason"] = client.reason
        rows["calls under way"] = len(client.inflight) + len(client.queue) + len(client.late)
    rows["methods"] = ", ".join(name for name in handle._methods if not name.startswith("__"))
    return table(f"Actor {handle._class_name}", rows)


def remote_html(kind: str, wrapped: Any, options: Mapping[str, Any]) -> str:
    """A remote function or an actor class: its signature, options and docstring."""
    try:
        signature = str(inspect.signature(wrapped))
    except (TypeError, ValueError):
        signature = ""
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    doc = (inspect.getdoc(wrapped) or "")[:_LONGEST_DOC]
    name = getattr(wrapped, "__qualname__", type(wrapped).__name__)
    return table(f"{kind} {name}{signature}", {"options": given, "about": doc})
