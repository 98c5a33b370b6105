"""Where a `get` puts the tensors of a device object: memory of the program, or another device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from hpcray.common.exceptions import GetTimeoutError
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.runtime.core_worker.extensions import Extension
from hpcray.runtime.core_worker.io_engine import monotonic
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
    """Target of a ref. buffers, device: as in `TensorPlacement`."""

    ref: weakref.ref[Any]
    buffers: list[weakref.ref[Any]] | None
    device: str

    def alive(self) -> list[Any] | None:
        """Return the buffers; None if one of them is gone, as the others are not used then."""
        found = [buffer() for buffer in self.buffers or ()]
        return None if self.buffers is None or any(buffer is None for buffer in found) else found


class ReadTargets(Extension):
    """The targets of one process. Its `get` looks at them from the first one on.

    Args:
        process: its `get` and `get_one` are replaced.
    """

    name = "read_targets"

    def __init__(self, process: CoreWorker) -> None:
        super().__init__(process)
        self._process = process
        self._targets: dict[bytes, _Target] = {}
        self._get_one, self._get = process.get_one, process.get
        process.get_one, process.get = self.get_one, self.get

    def set(self, ref: ObjectRef[Any], buffers: Sequence[Any] | None, device: str = "") -> None:
        """Have `get` of a ref read into these tensors, which it does not keep alive, or to a device."""
        alive = {oid: target for oid, target in self._targets.items() if target.ref() is not None}
        references = None if buffers is None else [weakref.ref(buffer) for buffer in buffers]
        alive[ref._id] = _Target(weakref.ref(ref), references, device)
        self._targets = alive

    def get_one(self, ref: ObjectRef[Any], timeout: float | None) -> Any:
        """Return the value of a ref, as `ObjectReader.get_one` does.

        Raises:
            ValueError: it has a target, and is no device object, or its tensors do not fit.
        """
        target = self._targets.get(ref._id)
        if target is None:
            return self._get_one(ref, timeout)
        local = self._process.local
        outer = local.read_target
        placement = local.read_target = TensorPlacement(target.alive(), target.device)
        try:
            value = self._get_one(ref, timeout)
        finally:
            local.read_target = outer
        if outer is not None:  # its value was lost while it was unpickled, and this is the one that was made again
            outer.used, outer.error = placement.used, placement.error
            return value
        if placement.error is not None:
            raise placement.error
        if not placement.used:
            raise ValueError(f"Ref {ref} is not an RDT object. hint: set tensor_transport on what makes it")
        return value

    def get(self, refs: Sequence[ObjectRef[Any]], timeout: float | None) -> list[Any]:
        """Return the values of refs, as `ObjectReader.get` does.

        Raises:
            ValueError: as `get_one`.
        """
        if self._targets.keys().isdisjoint(ref._id for ref in refs):
            return self._get(refs, timeout)
        deadline = None if timeout is None else monotonic() + timeout
        values: list[Any] = []
        for ref in refs:
            left = None if deadline is None else max(0.0, deadline - monotonic())
            try:
                values.append(self.get_one(ref, left))
            except GetTimeoutError as error:
                text = f"{len(values)} of {len(refs)} values were read in {timeout} s; {error}"
                raise GetTimeoutError(text) from None
        return values


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
