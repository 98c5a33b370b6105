"""The mark of nodes of graphs, for modules that nodes are made of."""

from __future__ import annotations

from abc import ABC
from typing import Any


class DAGNodeBase(ABC):  # a mark: the methods are in `DAGNode`
    """Any node of a graph: what `py_obj_scanner` finds in arguments."""

    _stable_uuid: str
    _bound_args: Any
    _bound_kwargs: Any
    _bound_options: Any
    _bound_other_args_to_resolve: Any
