"""The wires of one node. Those to nodes of other worlds are opened when the first of these joins; until then a node has
what it started with: MPI and a data plane, or nothing where it is the only one."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from functools import partial

from hpcray.core.gcs.handshake import link_key
from hpcray.platform.arena import Arena
from hpcray.protocol.messages import NodeInfo
from hpcray.runtime.raylet.raylet import Raylet
from hpcray.transport.base import ControlTransport, DataPlane, ReceiveBuffers, TransportError
from hpcray.transport.ucx_control import JointControl, UcxControl
from hpcray.transport.ucx_data import UcxData
from hpcray.transport.ucx_engine import UcxEngine

SECRET_BYTES = 32


def open_world(rank: int | None, secret: bytes, one_host: bool, arena: Arena) -> tuple[UcxControl, UcxData]:
    """The wires of a world of one rank.

    Args:
        rank: its number; None: it has none yet.
        one_host: whether no node of another host will join; then there is no TCP.

    Raises:
        TransportError: UCX does not start.
    """
    engine = UcxEngine(0 if rank is None else rank, secret, one_host)
    data = UcxData(engine)
    data.register(arena.view(0, arena.whole), arena.view)
    control = UcxControl(engine, partial(link_key, secret))
    if rank is not None:
        control.own(rank)
    return control, data


class NodeTransports:
    """The transports of one raylet, which it replaces when the first node of another world joins.

    Args:
        elastic: whether nodes of other hosts may join at any time.

    Attributes:
        control, data: those in use; None in both while the node is the only one and no other may join.
    """

    def __init__(
        self, control: ControlTransport | None, data: DataPlane | None, arena: Arena, elastic: bool = False
    ) -> None:
        self.control = control
        self.data = data
        self._arena = arena
        self._elastic = elastic
        self._outer: UcxControl | None = None
        self._alone: tuple[UcxControl, UcxData] | None = None  # of a job of one node, opened ahead
        self._prepared: list[Callable[[], None]] = []
        if isinstance(control, UcxControl):
            self._outer = control
        elif isinstance(control, JointControl):
            self._outer = control.outer
        self._raylet: Raylet

    def shares_mpi(self, node: int) -> bool:
        """Return True if this node is of the same MPI world, which its death leaves incomplete."""
        if isinstance(self.control, JointControl):
            return self.control.shares_mpi(node)
        return self.control is not None and not isinstance(self.control, UcxControl)

    def attach(self, raylet: Raylet) -> None:
        """Complete this object with the raylet that uses the wires; before `outer` is called."""
        self._raylet = raylet

    def receive_into(self, buffers: ReceiveBuffers) -> None:
        """Receive long messages into this memory."""
        if self.control is not None:
            self.control.receive_into(buffers)

    def prepare(self, one_host: bool, then: Callable[[], None]) -> None:
        """Call `then` when `outer` takes no time. In a job of one node UCX must be loaded and opened, in a thread: the
        raylet goes on meanwhile."""
        if self._outer is not None or self.control is not None:
            then()
            return
        self._prepared.append(then)
        if len(self._prepared) > 1:
            return
        loop, done = self._raylet.loop, os.eventfd(0, os.EFD_CLOEXEC)

        def open_here() -> None:
            with contextlib.suppress(TransportError):  # `_open` raises it again
                self._alone = self._open_alone(one_host and not self._elastic)
            os.eventfd_write(done, 1)

        def opened(event: int) -> None:
            loop.unwatch(done)
            os.close(done)
            calls, self._prepared = self._prepared, []
            for call in calls:
                call()

        loop.watch(done, opened)
        threading.Thread(target=open_here, name="hpcray-open-ucx", daemon=True).start()

    def _open_alone(self, one_host: bool) -> tuple[UcxControl, UcxData]:
        return open_world(self._raylet.node, os.urandom(SECRET_BYTES), one_host, self._arena)

    def outer(self, one_host: bool = True) -> UcxControl:
        """The wire to nodes of other worlds; opened at the first call.

        Args:
            one_host: whether all of these are on this host; then no TCP is opened for them.

        Raises:
            TransportError: there cannot be one.
        """
        if self._outer is None:
            self._outer = self._open(one_host and not self._elastic)
        engine = self.engine()
        if engine.one_host and not one_host:
            raise TransportError(
                "the nodes of this job are on one host, and its UCX was opened without TCP; hint: start it with "
                "HPCRAY_ELASTIC=1, which lets nodes of other hosts join"
            )
        return self._outer

    def dropped(self) -> int:
        """Return how many frames and messages of strangers were thrown away."""
        return self._outer.dropped if self._outer is not None else 0

    def engine(self) -> UcxEngine:
        """The UCX engine that the wire to other worlds shares with the data plane."""
        assert isinstance(self.data, UcxData)
        return self.data.engine

    def meet(self, info: NodeInfo) -> None:
        """Connect to a node that joins, or that was there before this one.

        Raises:
            TransportError: no transport of UCX reaches it.
        """
        me = self._raylet.context.info
        outer = self.outer(info.host == me.host)
        outer.grow(info.index + 1)
        assert self.data is not None
        if not self.engine().knows(info.index):
            self.data.connect(info.index, info.data_address, info.host == me.host)

    def _open(self, one_host: bool) -> UcxControl:
        raylet, control, data = self._raylet, self.control, self.data
        if control is None:
            outer, self.data = self._alone or self._open_alone(one_host)
            joint: ControlTransport = outer
        elif isinstance(data, UcxData):
            secret = data.engine.secret
            outer = UcxControl(data.engine, partial(link_key, secret))
            outer.own(raylet.node)
            joint = JointControl(control, outer)
        else:
            raise TransportError(
                "object bytes of this job go over MPI, which no node can join later; hint: HPCRAY_DATA_PLANE=ucx"
            )
        assert self.data is not None
        self.control = joint
        raylet.router.attach(joint)
        raylet.transfers.use(self.data)
        raylet.loop.attach(joint, self.data)
        return outer
