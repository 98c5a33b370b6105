"""Messages between the tensors of two processes, inside `ExtensionMessage`s of the extension "tensors"."""

from __future__ import annotations

from typing import Union

from msgspec import Struct


class OpenTensors(Struct, array_like=True, tag=0):
    """reader→process with the tensors of a device object that may move to the object store: the reader is about to map
    their memory. Answer: TensorsOpened."""

    id: bytes


class TensorsOpened(Struct, array_like=True, tag=1):
    """process with tensors→reader. kept: they stay where they are until the reader sends CloseTensors, or dies; else
    they have moved."""

    id: bytes
    kept: bool


class CloseTensors(Struct, array_like=True, tag=2):
    """reader→process with tensors: no work of the reader uses their memory any more."""

    id: bytes


class PullTensors(Struct, array_like=True, tag=3):
    """reader→process with the tensors of a device object: send these ranges of their memory by UCX, from the device,
    each as a message of its own. pull: number of the reader's. key: 16 bytes that no other process knows; the tags are
    made from it. address: of the reader's UCX worker. ranges: (storage, first byte, bytes). only: there is to be no
    other way. Answer: TensorsPushed."""

    id: bytes
    pull: int
    key: bytes
    address: bytes
    ranges: list[tuple[int, int, int]]
    only: bool = False


class TensorsPushed(Struct, array_like=True, tag=4):
    """process with tensors→reader: what was asked for is being sent. reason: why it is not, or not all of it, as known
    at the beginning or later; "": it is. gone: the reader gets the tensors from the store; else they cannot be sent
    this way."""

    id: bytes
    pull: int
    reason: str = ""
    gone: bool = False


class CancelTensors(Struct, array_like=True, tag=5):
    """reader→process with tensors: the reader has given up this pull."""

    id: bytes
    pull: int


TensorMessage = Union[OpenTensors, TensorsOpened, CloseTensors, PullTensors, TensorsPushed, CancelTensors]
