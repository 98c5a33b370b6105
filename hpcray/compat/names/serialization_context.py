"""`ray._private.serialization`, `ray.util.serialization`: values as bytes, and the serializers of classes."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import IO, Any

import cloudpickle

from hpcray.protocol.out_of_band import reduce_with
from hpcray.protocol.serialization import serialize
from hpcray.util.serialization import inspect_serializability, register_serializer


class SerializedObject:
    """A value as bytes, in the form in which it travels.

    Attributes:
        total_bytes: its size.
        metadata: the kind of the form; there is one.
    """

    metadata = b"PYTHON"

    def __init__(self, value: Any) -> None:
        self._blob, self.contained_object_refs = serialize(value)
        self.total_bytes: int = len(self._blob) if isinstance(self._blob, bytes) else self._blob.size

    def to_bytes(self) -> bytes:
        """Return the bytes; buffers out of band are copied."""
        return self._blob if isinstance(self._blob, bytes) else self._blob.join()


class SerializationContext:
    """Pickling of the values that this process sends. Registrations also hold for `ray.cloudpickle`."""

    def _register_cloudpickle_reducer(self, cls: type, reducer: Callable[[Any], Any]) -> None:
        reduce_with(cls, reducer)

    def _unregister_cloudpickle_reducer(self, cls: type) -> None:
        reduce_with(cls, None)

    def _register_cloudpickle_serializer(
        self, cls: type, custom_serializer: Callable[[Any], Any], custom_deserializer: Callable[[Any], Any]
    ) -> None:
        register_serializer(cls, serializer=custom_serializer, deserializer=custom_deserializer)

    def serialize(self, value: Any) -> SerializedObject:
        """Turn a value into bytes.

        Raises:
            TypeError: it does not pickle.
        """
        return SerializedObject(value)


StandaloneSerializationContext = SerializationContext
"""Ray's own has no `serialize`."""


# ------------------------------------------------------------ pickling
# `dump_debug` and `dumps_debug` of `ray.cloudpickle`, which name what does not pickle.


_SWITCH = "RAY_PICKLE_VERBOSE_DEBUG"


def dump_debug(obj: Any, file: IO[bytes], *args: Any, **kwargs: Any) -> None:
    """Pickle a value to a file. With RAY_PICKLE_VERBOSE_DEBUG an error prints a report of `inspect_serializability`."""
    _explained("ray.cloudpickle.dump", obj, lambda: cloudpickle.dump(obj, file, *args, **kwargs))


def dumps_debug(obj: Any, *args: Any, **kwargs: Any) -> bytes:
    """Pickle a value. With RAY_PICKLE_VERBOSE_DEBUG an error prints a report of `inspect_serializability`."""
    made: bytes = _explained("ray.cloudpickle.dumps", obj, lambda: cloudpickle.dumps(obj, *args, **kwargs))
    return made


def _explained(name: str, obj: Any, pickled: Callable[[], Any]) -> Any:
    try:
        return pickled()
    except (TypeError, pickle.PicklingError) as error:
        if os.environ.get(_SWITCH):
            inspect_serializability(obj)
            raise
        raise type(error)(f"{name}({obj}) failed: {error}. {_SWITCH}=1 shows which variables do not pickle.") from error
