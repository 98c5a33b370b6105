"""Named actors, seen from outside."""

from __future__ import annotations

from typing import Any

from hpcray.api.session import ensure


def list_named_actors(all_namespaces: bool = False) -> list[Any]:
    """Names of the live named actors of this namespace, or rows `{"name", "namespace"}` of all namespaces."""
    process = ensure()
    namespace = process.job.namespace if process.job else ""
    rows: list[dict[str, str]] = process.gcs.call("list_named_actors", all_namespaces, namespace)
    return rows if all_namespaces else [row["name"] for row in rows]
