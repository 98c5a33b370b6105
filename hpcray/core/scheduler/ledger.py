"""What a node has, what is free, and what each lease or actor holds of it. Exact integers throughout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpcray.base.ids import node_of
from hpcray.base.resources import UNIT, Resources, add, fits, subtract
from hpcray.core.scheduler.devices import GPU, DeviceBook
from hpcray.core.scheduler.queue import Want
from hpcray.wire.messages import ActorSpec, NodeView

if TYPE_CHECKING:
    from hpcray.core.scheduler.bundles import Bundle, BundleBook

VIEW_PAUSE = 0.1
"""That a node has less than it said is told after this long at the latest; that it has more at once."""
CROWD, CROWD_PAUSE = 64, 1e-4
"""In larger clusters a node is silent for this long, times their size, after each view that nobody waits for: the head
reads at most ten thousand of them in a second, however many nodes there are."""
LENDABLE = "CPU"
"""The one resource a worker lends while it waits in `get`; a GPU's memory stays occupied, so it is never lent."""


@dataclass(slots=True, eq=False)
class Claim:
    """Resources held for one lease or one actor, from the decision to the end of its worker.

    Attributes:
        ident: the lease id, or the actor id.
        holder: who may push tasks; b"" once the lease has ended and only the worker's death is awaited.
        worker: proc id of the worker, b"" while it is being forked.
        env: what its worker must have; for a claim on GPUs the ledger adds which.
        devices: indices of its GPUs.
        lent: its CPU is given back because the worker blocks.
        leaving: why the actor ends on purpose; "" while it does not.
        bundle: what it is part of; then `request` is by the names inside.
    """

    ident: bytes
    want: Want
    request: Resources
    holder: bytes
    klass: int
    env: tuple[tuple[str, str], ...]
    spec: ActorSpec | None = None
    restarts: int = 0
    worker: bytes = b""
    devices: tuple[int, ...] = ()
    lent: bool = False
    leaving: str = ""
    kill_reason: str = ""
    bundle: Bundle | None = None


@dataclass(slots=True)
class Ledger:
    """Books of one node. `available` may go negative, only through `resume`.

    Attributes:
        gpu_ids: of its GPUs; by default they are numbered.
        devices: the GPUs one by one; None where there is none.
        bundles: what is set aside for placement groups; None in the books of a bundle.
    """

    node: int
    total: Resources
    gpu_ids: Sequence[str] = ()
    devices: DeviceBook | None = field(init=False, default=None)
    available: Resources = field(init=False)
    actors: Resources = field(default_factory=dict)
    version: int = 0
    bundles: BundleBook | None = None
    _published: Resources = field(default_factory=dict)
    _lasting: Resources = field(default_factory=dict)
    _said_at: float = float("-inf")
    _pause: float = 0.0

    def __post_init__(self) -> None:
        self.available = dict(self.total)
        count = self.total.get(GPU, 0) // UNIT
        ids = self.gpu_ids or [str(index) for index in range(count)]
        if len(ids) != count:
            raise ValueError(f"node {self.node} has {count} GPUs, but the ids {', '.join(ids)}")
        if count:
            self.devices = DeviceBook(ids)

    def feasible(self, request: Resources) -> bool:
        """Whether the node could serve `request` if it were empty."""
        return fits(request, self.total) and (
            self.devices is None or GPU not in request or self.devices.possible(request[GPU])
        )

    def reachable(self, request: Resources) -> bool:
        """Whether `request` would fit if every lease ended and only the actors stayed."""
        if any(self.total.get(name, 0) - self.actors.get(name, 0) < units for name, units in request.items()):
            return False
        return self.devices is None or GPU not in request or self.devices.reachable(request[GPU])

    def take(self, claim: Claim) -> None:
        """Hold the claim's resources; one that asks for GPUs learns which."""
        if self.bundles is not None and claim.want.bundle is not None:
            self.bundles.take(claim)
            return
        subtract(self.available, claim.request)
        if self.devices is not None and GPU in claim.request:
            claim.devices = self.devices.take(claim.request[GPU], claim.spec is not None)
            claim.env = self.devices.dress(claim.env, claim.devices)
        if claim.spec is not None:
            add(self.actors, claim.request)

    def give(self, claim: Claim) -> None:
        """Free what the claim still holds."""
        if self.bundles is not None and claim.bundle is not None:
            self.bundles.give(claim, claim.bundle)
            return
        add(self.available, claim.request)
        if claim.devices and self.devices is not None:
            self.devices.give(claim.devices, claim.request[GPU], claim.spec is not None)
            claim.devices = ()
        if claim.spec is not None:
            subtract(self.actors, claim.request)
        if claim.lent:
            claim.lent = False
            subtract(self.available, {LENDABLE: claim.request[LENDABLE]})

    def lend(self, claim: Claim) -> bool:
        """Give back the CPU of a worker that blocks; whether anything changed."""
        if self.bundles is not None and claim.bundle is not None:
            return self.bundles.lend(claim, claim.bundle)
        if claim.lent or LENDABLE not in claim.request:
            return False
        claim.lent = True
        add(self.available, {LENDABLE: claim.request[LENDABLE]})
        return True

    def resume(self, claim: Claim) -> None:
        """Take the lent CPU back at once, even if somebody else got it meanwhile."""
        if self.bundles is not None and claim.bundle is not None:
            self.bundles.resume(claim, claim.bundle)
        elif claim.lent:
            claim.lent = False
            subtract(self.available, {LENDABLE: claim.request[LENDABLE]})

    def crowd(self, cluster_size: int) -> None:
        """How many nodes tell the same head."""
        self._pause = CROWD_PAUSE * cluster_size if cluster_size > CROWD else 0.0

    def view(self, now: float, force: bool = False) -> NodeView | None:
        """The message that tells the head what has changed of what is free, None when nothing has that is urgent.

        Args:
            force: tell everything: the head may think otherwise.
        """
        bundles, published = self.bundles, self._published
        news = bundles is not None and bundles.has_news
        if not force:
            if not news and published == self.available and self._lasting == self.actors:
                return None
            silent = now - self._said_at
            if not news and silent < VIEW_PAUSE:
                more = any(units > published.get(name, units - 1) for name, units in self.available.items())
                if not more or silent < self._pause:
                    return None
        self.version += 1
        self._said_at = now
        free = {n: units for n, units in self.available.items() if force or published.get(n) != units}
        lasting = {
            n: self.actors.get(n, 0) for n in self.available if force or self.actors.get(n) != self._lasting.get(n)
        }
        self._published, self._lasting = dict(self.available), dict(self.actors)
        return NodeView(self.node, self.version, free, bundles.news() if bundles is not None else {}, lasting)


def lease_id(node: int, count: int) -> bytes:
    """Id of a node's `count`-th lease: node u16 | counter u48, so `ids.node_of` tells whom to return it to."""
    return node.to_bytes(2, "big") + count.to_bytes(6, "big")


def granter_of(lease: bytes) -> int:
    """Node index of the raylet that granted the lease."""
    return node_of(lease)
