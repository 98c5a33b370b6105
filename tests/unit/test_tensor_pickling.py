"""PyTorch's CPU tensors as blobs: their memory travels out of band, and only the part of it that they cover."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcray.protocol import out_of_band
from hpcray.protocol.out_of_band import reduce_with
from hpcray.protocol.serialization import Serialized, deserialize, serialize

torch = pytest.importorskip("torch")


def blob_of(value: Any) -> bytes:
    made, _ = serialize(value)
    return made.join() if isinstance(made, Serialized) else made


def there(value: Any) -> Any:
    """The value as another process reads it."""
    return deserialize(blob_of(value))


def bits(tensor: Any) -> Any:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


DTYPES = sorted(
    {kind for kind in vars(torch).values() if isinstance(kind, torch.dtype) and not str(kind).startswith("torch.q")},
    key=str,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_bit_for_bit(dtype: Any) -> None:
    try:
        made = torch.arange(64, dtype=torch.uint8).view(dtype).reshape(-1, 2)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this PyTorch makes no tensor of it: {error}")
    of_bits = "int" in str(dtype) and int(str(dtype).split("int")[1]) < 8  # PyTorch copies no part of such a tensor
    for tensor in (made, made[1:]) if of_bits else (made, made[1:], made[:, :1], made.t()):
        got = there(tensor)
        assert got.dtype == dtype and got.shape == tensor.shape and got.stride() == tensor.stride()
        assert torch.equal(bits(got), bits(tensor))


KINDS: dict[str, Callable[[], Any]] = {
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.zeros(0, 3),
    "empty part of a large one": lambda: torch.zeros(1000, 3)[500:500],
    "expanded": lambda: torch.ones(1).expand(5, 5),
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j]).conj().imag,
    "sparse": lambda: torch.eye(50).to_sparse(),
    "compressed rows": lambda: torch.eye(50).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(100), 0.1, 0, torch.qint8),
    "with an attribute": lambda: _with_attribute(torch.arange(4.0)),
    "read-only NumPy's": lambda: torch.from_numpy(_read_only()),
}


def _with_attribute(tensor: Any) -> Any:
    tensor.note = "kept"
    return tensor


def _read_only() -> Any:
    import numpy as np

    array = np.arange(5.0)
    array.flags.writeable = False
    return array


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_all_kinds_arrive_as_they_were(kind: str) -> None:
    tensor = KINDS[kind]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=UserWarning, message="Sparse CSR|.*quantize|TypedStorage")
        got = there(tensor)
    assert got.layout == tensor.layout and got.shape == tensor.shape and got.dtype == tensor.dtype
    dense = [each.dequantize() if each.is_quantized else each.to_dense() for each in (got, tensor)]
    assert torch.equal(*dense) and got.__dict__ == tensor.__dict__


def test_gradients_and_parameters_stay_what_they_are() -> None:
    got = there(
        [torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2), False)]
    )
    assert [type(each) for each in got] == [torch.Tensor, torch.nn.Parameter, torch.nn.Parameter]
    assert [each.requires_grad for each in got] == [True, True, False]


def test_a_model_arrives_with_its_tied_weights() -> None:
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    second.weight = first.weight
    got = there(torch.nn.Sequential(first, torch.nn.BatchNorm1d(8), second))
    assert got[0].weight is got[2].weight and got[1].running_mean.shape == (8,)
    x = torch.randn(4, 8)
    assert torch.equal(got[0](x), first(x))


def test_a_nested_tensor_arrives() -> None:
    parts = [torch.arange(2.0), torch.arange(3.0)]
    got = there(torch.nested.nested_tensor(parts, layout=torch.jagged))
    assert all(torch.equal(*pair) for pair in zip(got.unbind(), parts, strict=True))


def test_a_subclass_stays_one() -> None:
    got = there(torch.arange(6.0).as_subclass(Named))
    assert type(got) is Named and got.tolist() == [0, 1, 2, 3, 4, 5]


class Named(torch.Tensor):  # type: ignore[misc]
    pass


def test_storages_arrive() -> None:
    made = torch.arange(10.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        typed, untyped = there([made.storage(), made.untyped_storage()])
        assert typed.tolist() == made.tolist() and typed.untyped().data_ptr() == untyped.data_ptr()
    assert untyped.tolist() == made.untyped_storage().tolist()


def test_tensors_that_share_memory_share_it_where_they_are_read() -> None:
    base = torch.arange(1000)
    for value in ([base[10:20], base], [base, base[10:20]], [base[10:20], base[15:1000], base.view(torch.int32)]):
        got = there(value)
        assert all(torch.equal(*pair) for pair in zip(got, value, strict=True))
        for each in got:
            each[each == 17] = -1
        assert [17 in each.tolist() for each in got] == [False] * len(got), "the first one changed it for all"
        assert len({each.untyped_storage().data_ptr() for each in got}) == 1


def test_a_part_of_a_large_tensor_travels_alone() -> None:
    large = torch.arange(1 << 20, dtype=torch.int64)
    assert len(blob_of(large[1000:1010])) < 1000
    assert len(blob_of({"a": large[1000:1010], "b": large[1020:1030]})) < 1500
    got = there({"a": large[1000:1010], "b": large[1005:1030]})
    assert got["a"].tolist() == list(range(1000, 1010)) and got["b"].tolist() == list(range(1005, 1030))


def test_memory_may_be_resized_after_it_was_pickled_and_where_it_is_read() -> None:
    tensor = torch.arange(10.0)
    got = there(tensor)
    for each in (tensor, got):
        each.untyped_storage().resize_(0)
        each.untyped_storage().resize_(80)
        assert each.resize_(20).shape == (20,)


class OnDevice(torch.Tensor):  # type: ignore[misc]
    """A tensor of the host that says that it is on a GPU."""

    is_cpu, is_cuda = False, True

    @property
    def device(self) -> Any:
        return torch.device("cuda:1")


@pytest.fixture
def on_device() -> Iterator[Callable[[Any], Any]]:
    reduce_with(OnDevice, out_of_band._reduce_tensor)
    yield lambda tensor: tensor.as_subclass(OnDevice)
    reduce_with(OnDevice, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tensors_on_a_gpu_are_tensors_of_the_host_where_there_is_none(on_device: Callable[[Any], Any]) -> None:
    base = torch.arange(100_000.0)
    part, other, alone = base[1000:90_000], base[2000:2005], torch.ones(3, 4).t()
    value = [on_device(part), {"x": on_device(other)}, on_device(alone), torch.zeros(2)]
    got = there(value)
    for sent, read in zip((part, other, alone, torch.zeros(2)), (got[0], got[1]["x"], *got[2:]), strict=True):
        assert type(read) is torch.Tensor and torch.equal(sent, read) and sent.stride() == read.stride()
    assert got[0].untyped_storage().data_ptr() == got[1]["x"].untyped_storage().data_ptr(), "they share it again"
    assert 4 * 89_000 < len(blob_of(value)) < 4 * 89_000 + 2000, "only what they cover, once, beside the pickle"
    got[0].untyped_storage().resize_(0)


def test_a_value_that_cannot_be_pickled_leaves_nothing_behind() -> None:
    tensor = torch.arange(1000)
    with pytest.raises(TypeError, match="could not serialize"):
        serialize([tensor[5:], (each for each in ())])
    assert torch.equal(there(tensor[5:]), tensor[5:])


def test_a_value_pickled_inside_another_keeps_its_own_memory() -> None:
    base = torch.arange(1000)
    outer = [base[100:200], Inner(base[300:310]), base[150:160]]
    first, inner, last = there(outer)
    assert torch.equal(first, outer[0]) and torch.equal(last, outer[2])
    assert torch.equal(deserialize(inner), base[300:310])


class Inner:
    """Serializes a tensor of its own while it is pickled, as a value does that puts an object."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return bytes, (blob_of(self.tensor),)


@settings(max_examples=200)
@given(st.data())
def test_any_views_of_one_memory_arrive_whole(data: st.DataObject) -> None:
    base = torch.arange(data.draw(st.integers(1, 300)), dtype=torch.int32)
    views = []
    for _ in range(data.draw(st.integers(1, 5))):
        first = data.draw(st.integers(0, len(base)))
        step = data.draw(st.integers(1, 4))
        view = base[first : data.draw(st.integers(first, len(base))) : step]
        if data.draw(st.booleans()) and len(view):
            view = view.unsqueeze(0).expand(data.draw(st.integers(1, 3)), -1)
        if view.stride(-1) == 1 and data.draw(st.booleans()):
            view = view.view(torch.int16)
        views.append(view)
    got = there(views)
    for ours, theirs in zip(views, got, strict=True):
        assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride() and torch.equal(ours, theirs)
    assert len({each.untyped_storage().data_ptr() for each in got if each.numel()}) <= 1
