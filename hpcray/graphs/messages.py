"""Messages between the processes of a compiled graph, inside `ExtensionMessage`s of the extension "graphs"."""

from __future__ import annotations

from typing import Union

from msgspec import Struct


class ChannelValue(Struct, array_like=True, tag=0):
    """writer→reader of another node: the value with this number in a compiled graph, of the next execution. stored:
    `blob` is that of a ref, whose object is the value."""

    graph: bytes
    value_number: int
    blob: bytes
    stored: bool = False


class CloseGraph(Struct, array_like=True, tag=1):
    """driver of a compiled graph→process with an actor of it: it is torn down."""

    graph: bytes


GraphMessage = Union[ChannelValue, CloseGraph]
