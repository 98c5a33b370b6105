"""Messages of scheduling: leases for processes, grants between raylets and the head. See `wire.messages`."""

from __future__ import annotations

from msgspec import Struct

from hpcray.wire.messages.shapes import Resources, Shape


class Demand(Struct, array_like=True, tag=10):
    """p→own r. `total` is cumulative: leases this holder has ever received *from its own raylet* for this class, plus
    those it wants now. The raylet's outstanding count is `total` minus what it granted itself: no double grants."""

    klass: int
    shape: Shape
    total: int


class LeaseGranted(Struct, array_like=True, tag=11):
    """r (any node)→p. wanted: others wait for what it holds: it goes back as soon as there is nothing to do for it."""

    klass: int
    lease: bytes
    worker: bytes
    wanted: bool = False


class LeaseReturn(Struct, array_like=True, tag=12):
    """p→the granting r. bad: the worker must not be reused."""

    lease: bytes
    bad: bool = False


class ReclaimIdle(Struct, array_like=True, tag=13):
    """r→p: others wait; give back leases of this node that are idle, and not keep any that becomes idle. busy: also
    those at work, when what was sent to them is done."""

    busy: bool = True


class Blocked(Struct, array_like=True, tag=14):
    """worker→own r: its task waits in get/wait; its CPU may be lent."""


class Unblocked(Struct, array_like=True, tag=15):
    """worker→own r: it runs again and takes its CPU back at once (over-commitment is allowed here)."""


class Infeasible(Struct, array_like=True, tag=16):
    """r→p: no node of the cluster can ever run this shape; the reason names what every node has.

    waits: it could be run, but has waited for long; said again from time to time.
    """

    klass: int
    reason: str
    waits: bool = False


class LeaseRevoked(Struct, array_like=True, tag=17):
    """r→holder: the leased worker died."""

    lease: bytes
    worker: bytes
    reason: str


class Unmet(Struct, array_like=True, tag=20):
    """r→g: outstanding demand of one holder's class that this node cannot serve now (absolute; 0 withdraws)."""

    holder: bytes
    klass: int
    shape: Shape
    count: int


class GrantFor(Struct, array_like=True, tag=21):
    """g→r: try to grant up to `count` leases to this holder. parked: what is said again: so many may queue, in all."""

    holder: bytes
    klass: int
    shape: Shape
    count: int
    parked: bool = False


class GrantRefused(Struct, array_like=True, tag=22):
    """r→g: this many of a GrantFor did not fit any more."""

    holder: bytes
    klass: int
    count: int


class NodeView(Struct, array_like=True, tag=23):
    """r→g: available resources of a node, those that changed since its last view (amounts are absolute, views numbered;
    they come in order). bundles: the same for what is free in bundles of placement groups; lasting: for what actors and
    bundles hold."""

    node: int
    version: int
    available: Resources
    bundles: Resources = {}
    lasting: Resources = {}


class OthersWait(Struct, array_like=True, tag=24):
    """g→r: work finds no room, for lack of these. No lease that holds any of it should idle then, here either, but
    those of this class of this holder, if it is the only one that waits. Nothing is lacking: none waits any more."""

    lacking: list[str] = []
    holder: bytes = b""
    klass: int = 0
