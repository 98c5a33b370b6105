"""What several kinds of message carry."""

from __future__ import annotations

from msgspec import Struct

Resources = dict[str, int]


class Shape(Struct, array_like=True, frozen=True):
    """What a lease or an actor asks of a node. Equal shapes share leases.

    resources: units; strategy: "" (hybrid), "SPREAD", "node:<index>[:soft]", "labels:<conditions>" (`base.labels`),
    "near:<index>" for tasks whose arguments are on that node, or "group[:capture]" for a request in a placement group;
    env: environment variables that the worker must have (a worker serves one env for life).
    """

    resources: tuple[tuple[str, int], ...]
    strategy: str = ""
    env: tuple[tuple[str, str], ...] = ()
