"""Nodes of graphs as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hpcray.graphs.base import DAGNodeBase

_INDENT = " " * 4


def get_dag_node_str(dag_node: DAGNodeBase, body_line: Any) -> str:
    """Return the text of a node, with those of the nodes among its arguments below it."""
    options = [f"{key}: {value}" for key, value in dag_node._bound_options.items() if value]
    args = [line for arg in dag_node._bound_args for line in _lines_of(arg)]
    parts = {
        "body": str(body_line),
        "args": _block("[", args, "]"),
        "kwargs": _block("{", _named(dag_node._bound_kwargs), "}"),
        "options": _block("{", options, "}") if dag_node._bound_options else "{}",
        "other_args_to_resolve": _block("{", _named(dag_node._bound_other_args_to_resolve), "}"),
    }
    lines = "".join(f"{_INDENT}{name}={text}\n" for name, text in parts.items())
    return f"({type(dag_node).__name__}, {dag_node._stable_uuid})(\n{lines})"


def _lines_of(value: Any) -> list[str]:
    members: Iterable[Any] = (
        value if isinstance(value, list) else value.values() if isinstance(value, dict) else (value,)
    )
    whole = not isinstance(value, (list, dict, DAGNodeBase))
    return [line + ", " * whole for member in members for line in str(member).split("\n")]


def _named(values: Mapping[str, Any]) -> list[str]:
    found = []
    for key, value in values.items():
        first, *rest = _lines_of(value) or [""]
        found += [f"{key}:{_INDENT}{first}", *(f"{_INDENT}{line}" for line in rest)]
    return found


def _block(opening: str, lines: list[str], closing: str) -> str:
    if not lines:
        return opening + closing
    return "\n".join([opening, *(f"{_INDENT * 2}{line}" for line in lines), f"{_INDENT}{closing}"])
