"""Where a `get` puts the tensors of a device object: memory of the program, or another device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from hpcray.protocol.serialization import deserialize
from hpcray.runtime.core_worker.extensions import Extension
from hpcray.runtime.core_worker.object_reader import unknown_ref
from hpcray.runtime.core_worker.object_refs import ObjectRef


class TensorPlacement:
    """Where the tensors of one value are to be, for one `get`.

    Args:
        buffers: tensors that are to be filled; None: none. device: the device of new ones; "": they stay as they are.

    Attributes:
        used: whether the value is a device object. error: why its tensors do not fit.
    """

    def __init__(self, buffers: list[Any] | None, device: str) -> None:
        self.buffers, self._device = buffers, device
        self.used = False
        self.error: ValueError | None = None

    def buffers_for(self, metadata: Any) -> list[Any] | None:
        """Return the buffers if a registered transport can fill them; None: `place` sees to it."""
        described = [tuple(each) for each in getattr(metadata, "tensor_meta", None) or ()]
        fits = self.buffers is not None and [(buffer.shape, buffer.dtype) for buffer in self.buffers] == described
        return self.buffers if fits else None

    def place(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return the tensors that the value is to have, after they were filled from `tensors`."""
        self.used = True
        if self.buffers is None:
            return [tensor.to(self._device) for tensor in tensors] if self._device else tensors
        if problem := _mismatch(self.buffers, tensors):
            self.error = ValueError(problem)
            return tensors
        import torch

        with torch.no_grad():
            for buffer, tensor in zip(self.buffers, tensors, strict=True):
                if buffer is not tensor:
                    buffer.copy_(tensor)
        return self.buffers


class _Target(NamedTuple):
    """Target of a ref, whose id is `name` in hex. buffers, device: as in `TensorPlacement`."""

    name: str
    buffers: list[weakref.ref[Any]] | None
    device: str

    def alive(self) -> list[Any] | None:
        """Return the buffers; None if one of them is gone, as the others are not used then."""
        found = [buffer() for buffer in self.buffers or ()]
        return None if self.buffers is None or any(buffer is None for buffer in found) else found


class ReadTargets(Extension):
    """The targets of one process: `get` reads into them."""

    name = "read_targets"

    def set(self, ref: ObjectRef[Any], buffers: Sequence[Any] | None, device: str = "") -> None:
        """Have `get` of a ref read into these tensors, which it does not keep alive, or to a device. It raises
        ValueError where the object is no device object, or its tensors do not fit.

        Raises:
            RaySystemError: the ref is of an earlier session.
        """
        references = None if buffers is None else [weakref.ref(buffer) for buffer in buffers]
        with self.process.engine.lock:
            entry = self.process.table.entries.get(ref._id)
            if entry is None:
                raise unknown_ref(ref._id)
            entry.own_extra().target = self.name, _Target(ref.hex(), references, device)

    def targeted_value(self, target: _Target, blob: bytes | memoryview) -> tuple[Any, BaseException | None]:
        """Return the value of a blob with its tensors in the target, or why they are not there."""
        local = self.process.local
        outer = local.read_target
        placement = local.read_target = TensorPlacement(target.alive(), target.device)
        try:
            value = deserialize(blob)
        finally:
            local.read_target = outer
        if outer is not None:  # its value was lost while it was unpickled, and this is the one that was made again
            outer.used, outer.error = placement.used, placement.error
            return value, None
        if placement.error is None and not placement.used:
            hint = "hint: set tensor_transport on what makes it"
            return None, ValueError(f"Ref ObjectRef({target.name}) is not an RDT object. {hint}")
        return value, placement.error


def _mismatch(buffers: Sequence[Any], tensors: Sequence[Any]) -> str:
    """Return why tensors cannot be read into buffers; "" if they can."""
    if len(buffers) != len(tensors):
        return f"Length of tensor_buffers ({len(buffers)}) does not match length from object metadata ({len(tensors)})."
    for number, (buffer, tensor) in enumerate(zip(buffers, tensors, strict=True)):
        for name in ("shape", "dtype"):
            mine, wanted = getattr(buffer, name), getattr(tensor, name)
            if mine != wanted:
                what = f"{name.capitalize()} of tensor_buffer at index {number} ({mine})"
                return f"{what} does not match {name} from object metadata ({wanted})."
    return ""
