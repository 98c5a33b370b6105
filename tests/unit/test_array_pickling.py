"""Arrays of other libraries than NumPy as blobs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpcray.protocol.serialization import Serialized, deserialize, serialize


def there(value: Any, out_of_band: int) -> Any:
    """The value as another process reads it, with at least so many bytes beside the pickle."""
    made, _ = serialize(value)
    assert isinstance(made, Serialized) and made.size - len(made.pickle) >= out_of_band
    return deserialize(made.join())


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "int4"])
def test_arrays_of_dtypes_from_a_library_are_read_in_place(name: str) -> None:
    dtype = getattr(pytest.importorskip("ml_dtypes"), name)
    for array in (np.arange(7000).astype(dtype), np.ones((100, 50), dtype)[:, ::2]):
        got = there(array, array.nbytes)
        assert got.dtype == array.dtype and got.shape == array.shape and not got.flags.writeable
        assert np.array_equal(got.astype(float), array.astype(float), equal_nan=True)


def test_jax_arrays_arrive() -> None:
    jax = pytest.importorskip("jax")
    for array in (jax.numpy.arange(10_000.0), jax.numpy.ones((100, 100), "bfloat16"), jax.numpy.zeros((0, 3))):
        got = there({"array": array}, array.nbytes)["array"]
        assert type(got) is type(array) and got.dtype == array.dtype and (got == array).all()
    weak = jax.numpy.asarray(3.0) * 1
    made, _ = serialize(weak)
    assert isinstance(made, bytes) and deserialize(made).weak_type == weak.weak_type
