"""A raylet: the pure cores of one node, composed with its loop, its processes and its wires."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcray.base.config import Config
from hpcray.base.ids import raylet_of
from hpcray.core import effects as fx
from hpcray.core.raylet import HANDLES, RayletCore
from hpcray.core.store.node_store import NodeStore
from hpcray.host.prefault import Prefaulter
from hpcray.runtime.leaving import Leaving
from hpcray.runtime.local_links import Link
from hpcray.runtime.local_processes import LocalProcesses
from hpcray.runtime.raylet_loop import RayletLoop
from hpcray.runtime.router import Router
from hpcray.transport.base import ControlTransport, DataPlane, TransportError
from hpcray.wire import messages as m

Effects = list[fx.Effect]
Handler = Callable[[float, bytes, Any], Effects]

_STORE = (m.Create, m.Seal, m.Open, m.Release, m.Free, m.Pull, m.PullRefused)


@dataclass(frozen=True)
class Seat:
    """What one raylet is told about itself.

    Attributes:
        info: this node, as the head will know it.
        cluster_size: number of nodes.
        session_dir: its session directory.
        config: its settings.
    """

    info: m.NodeInfo
    cluster_size: int
    session_dir: str
    config: Config


class Raylet:
    """Dispatches messages by type, carries out effects, and tells the cores what lived and died.

    Args:
        seat: who this raylet is.
        loop, router: of this process.
        store: the node's objects.
        core: the node's leases and workers.
        prefault: populates arena pages ahead of the store.
        control, data: the wires, None on a node that is alone.
    """

    def __init__(
        self,
        seat: Seat,
        loop: RayletLoop,
        router: Router,
        core: RayletCore,
        store: NodeStore,
        prefault: Prefaulter,
        control: ControlTransport | None,
        data: DataPlane | None,
    ) -> None:
        self.seat = seat
        self.node = seat.info.index
        self.me = raylet_of(self.node)
        self.loop = loop
        self.router = router
        self.core = core
        self.store = store
        self.processes: LocalProcesses
        self.leaving: Leaving
        self._prefault = prefault
        self._control = control
        self._data = data
        self._parent = os.getppid()
        self._handlers: dict[type, Handler] = dict.fromkeys(HANDLES, core.handle)
        self._handlers |= dict.fromkeys(_STORE, store.handle)
        self._handlers |= {
            m.Create: self._allocate,
            m.Open: self._allocate,
            m.Exit: self._exit_asked,
            m.ProcDied: self._remote_died,
            m.NodeDied: self._node_died,
            m.Stop: self._stop,
        }
        self._effects: dict[type, Callable[[Any], None]] = {
            fx.Send: lambda effect: router.send(effect.dest, effect.msg),
            fx.ForkWorker: lambda effect: self.processes.fork(effect.number, effect.env),
            fx.KillWorker: lambda effect: self.processes.kill(effect.worker),
            fx.StartReceive: self._start_receive,
            fx.StartSend: self._start_send,
            fx.CancelReceive: self._cancel_receive,
        }

    def apply(self, effects: Effects) -> None:
        """Carry out what a core asks for, in order."""
        carry_out = self._effects
        for effect in effects:
            carry_out[type(effect)](effect)

    # ------------------------------------------------------------ what the loop tells

    def hello(self, link: Link, hello: m.Hello) -> None:
        """See `raylet_loop.Events`."""
        self.processes.hello(link, hello)

    def messages(self, src: bytes, messages: list[m.Message]) -> None:
        """See `raylet_loop.Events`."""
        now = self.loop.now
        handlers = self._handlers
        for msg in messages:
            handler = handlers.get(type(msg))
            if handler is None:
                print(f"hpcray: raylet {self.node}: no use for {type(msg).__name__} from {src.hex()}", file=sys.stderr)
                continue
            effects = handler(now, src, msg)
            if effects:
                self.apply(effects)

    def link_closed(self, link: Link, reason: str) -> None:
        """See `raylet_loop.Events`."""
        self.processes.link_closed(link, reason)

    def transfer_ended(self, what: str, tag: int, error: str | None) -> None:
        """See `raylet_loop.Events`."""
        ended = self.store.received if what == "received" else self.store.sent
        self.apply(ended(self.loop.now, tag, error))

    # ------------------------------------------------------------ transfers

    def _allocate(self, now: float, src: bytes, msg: m.Message) -> Effects:
        effects = self.store.handle(now, src, msg)
        self._prefault.allocated_to(self.store.high_water)
        return effects

    def _start_receive(self, effect: fx.StartReceive) -> None:
        try:
            if self._data is None:
                raise TransportError(f"this cluster has no node {effect.node}")
            self._data.receive(effect.node, effect.tag, effect.offset, effect.size)
        except TransportError as error:
            self.transfer_ended("received", effect.tag, str(error))

    def _start_send(self, effect: fx.StartSend) -> None:
        try:
            if self._data is None:
                raise TransportError(f"this cluster has no node {effect.node}")
            self._data.send(effect.node, effect.tag, effect.offset, effect.size)
        except TransportError as error:
            self.transfer_ended("sent", effect.tag, str(error))

    def _cancel_receive(self, effect: fx.CancelReceive) -> None:
        if self._data is None or self._data.cancel(effect.tag):
            self.transfer_ended("received", effect.tag, "cancelled")
