"""Tasks run where most bytes of their arguments are, unless everything there is busy and other nodes are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hpcray.core.owner.entries import STORED, Entry
from hpcray.core.owner.leases import LeaseClient
from hpcray.core.owner.tasks import LeaseClass, Task
from hpcray.wire.messages import Shape


class Locality:
    """Sorts the tasks of a class by the node where their arguments are. A node each is a class of its own.

    Args:
        entries: of all objects that the process knows.
        node: its own.
        nodes: how many there are.
    """

    def __init__(self, leases: LeaseClient, entries: Mapping[bytes, Entry], node: int, nodes: int) -> None:
        self._leases = leases
        self._entries = entries
        self._node = node
        self._matters = nodes > 1
        self._near: dict[LeaseClass, dict[int, LeaseClass]] = {}
        self._last: dict[LeaseClass, Sequence[bytes]] = {}

    def klass(self, task: Task, klass: LeaseClass) -> LeaseClass:
        """The class for a task whose arguments are ready; `klass` itself where it makes no difference.

        Args:
            klass: by what the task asks for. One that says already where it runs stays as it is.
        """
        if not self._matters or klass.shape.strategy or type(klass.shape) is not Shape:
            return klass
        last = self._last.get(klass, ())
        slots = self._last[klass] = task.slots or ()
        # What the task before had too is no reason to run somewhere: each node fetches it once.
        there = self._bytes([object_id for object_id in slots if object_id not in last])
        again = not there
        if again:
            there = self._bytes(slots)
        if not there:
            return klass
        most = max(there.values())
        node = self._node if there.get(self._node) == most else min(n for n, size in there.items() if size == most)
        near = self._near_class(klass, node)
        if (again and near.queue) or (node == self._node and not self._busy_elsewhere(klass)):
            return klass
        return near

    def _bytes(self, objects: Sequence[bytes]) -> dict[int, int]:
        """How much of them is on which node."""
        there: dict[int, int] = {}
        for object_id in objects:
            entry: Any = self._entries.get(object_id)
            if entry is not None and entry.state == STORED and entry.nodes:
                for node in entry.nodes:
                    there[node] = there.get(node, 0) + entry.size
        return there

    def _busy_elsewhere(self, klass: LeaseClass) -> bool:
        """Whether other nodes have work near them; if not, they had better take some of ours at once."""
        near = self._near[klass]
        return any(found.queue or found.ring for node, found in near.items() if node != self._node)

    def _near_class(self, klass: LeaseClass, node: int) -> LeaseClass:
        classes = self._near.setdefault(klass, {})
        found = classes.get(node)
        if found is None:
            shape = msgspec.structs.replace(klass.shape, strategy=f"near:{node}")
            found = classes[node] = self._leases.klass(shape)
        return found
