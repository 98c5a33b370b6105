"""Who has a part in which object of a node store: what a death touches, without a look at all the others."""

from __future__ import annotations

from hpcray.base.ids import owner_of
from hpcray.core.store.objects import StoredObject


class Holdings:
    """The objects of the store, by the processes that have a part in them and by their owners."""

    def __init__(self) -> None:
        self._held: dict[bytes, dict[bytes, StoredObject]] = {}
        self._owned: dict[bytes, dict[bytes, StoredObject]] = {}

    def holders(self) -> list[bytes]:
        """The processes that have an object pinned."""
        return [proc for proc, held in self._held.items() if any(proc in obj.pins for obj in held.values())]

    def procs(self) -> list[bytes]:
        """The processes that have a part in an object."""
        return list(self._held)

    def held_by(self, proc: bytes) -> list[StoredObject]:
        """Objects that `StoredObject.concerns` it."""
        return list(self._held.get(proc, {}).values())

    def owned_by(self, proc: bytes) -> list[StoredObject]:
        """Objects that it owns, wherever it lives."""
        return list(self._owned.get(proc, {}).values())

    def add(self, obj: StoredObject) -> None:
        """An object came into the store."""
        self._owned.setdefault(owner_of(obj.id), {})[obj.id] = obj
        if obj.creator is not None:
            self.hold(obj.creator, obj)

    def remove(self, obj: StoredObject) -> None:
        """It left the store."""
        _drop(self._owned, owner_of(obj.id), obj)
        for proc in {*obj.pins, *obj.openers, *obj.keepers, obj.creator, obj.announcer}:
            if proc is not None:
                _drop(self._held, proc, obj)

    def hold(self, proc: bytes, obj: StoredObject) -> None:
        """The process begins to have a part in it."""
        self._held.setdefault(proc, {})[obj.id] = obj

    def let_go(self, proc: bytes, obj: StoredObject) -> None:
        """The process gave up a part; perhaps it has another."""
        if not obj.concerns(proc):
            _drop(self._held, proc, obj)

    def __len__(self) -> int:
        """Number of parts."""
        return sum(map(len, self._held.values()))


def _drop(index: dict[bytes, dict[bytes, StoredObject]], key: bytes, obj: StoredObject) -> None:
    objects = index.get(key)
    if objects is not None and objects.pop(obj.id, None) is not None and not objects:
        del index[key]
