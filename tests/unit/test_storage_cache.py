"""Memory of tensors is used again when nobody has it, and never before."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcray.protocol import storage_cache
from hpcray.protocol.serialization import Serialized, deserialize, serialize
from hpcray.protocol.storage_cache import LENT_TIME, REUSED_SIZE, UNUSED_TIME, StorageCache, Storages

torch = pytest.importorskip("torch")
SIZE = REUSED_SIZE


@pytest.fixture
def storages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storages]:
    """A cache of this test's own, whose thread trims nothing by itself."""
    own = Storages()
    own.keep(lambda: 64 * SIZE)
    monkeypatch.setattr(storage_cache, "_TRIM_INTERVAL", 1e6)
    yield own


def tensor_of(storage: Any) -> Any:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def typed(tensor: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tensor.storage()


def graph(tensor: Any) -> Any:
    other = torch.ones(SIZE // 4, requires_grad=True)
    return (other * tensor.view(torch.float32)).sum()  # keeps the tensor for its gradient


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "the tensor": lambda tensor: tensor,
    "a view": lambda tensor: tensor[5:7],
    "a view of another dtype": lambda tensor: tensor.view(torch.float32),
    "a detached tensor": lambda tensor: tensor.detach(),
    "its data": lambda tensor: torch.nn.Parameter(tensor.view(torch.float32)).data,
    "a Parameter": lambda tensor: torch.nn.Parameter(tensor.view(torch.float32)),
    "its storage": lambda tensor: tensor.untyped_storage(),
    "its typed storage": typed,
    "a NumPy array": lambda tensor: tensor.numpy(),
    "a memoryview": lambda tensor: memoryview(tensor.numpy())[3:],
    "a DLPack capsule": lambda tensor: torch.utils.dlpack.to_dlpack(tensor),
    "a graph": graph,
    "a closure": lambda tensor: lambda: tensor,
    "a method of its storage": lambda tensor: tensor.untyped_storage().tolist,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_is_not_used_again_while_something_holds_it(storages: Storages, holder: str) -> None:
    storage, fresh = storages.take(SIZE)
    assert fresh
    tensor = tensor_of(storage).fill_(7)
    held = HOLDERS[holder](tensor)
    del storage, tensor
    others = []
    for _ in range(3):
        other, fresh = storages.take(SIZE)
        assert fresh
        others.append(tensor_of(other).fill_(9))
        storages._cache._scanned.clear()  # type: ignore[union-attr]
    del held
    gc.collect()
    # Memory that NumPy has seen cannot be resized, and a tensor that is read can.
    assert storages.take(SIZE)[1] == (holder in ("a NumPy array", "a memoryview")), "nobody holds it any more"


def test_a_copy_that_pytorch_has_put_off_keeps_its_content(storages: Storages) -> None:
    storage, _ = storages.take(SIZE)
    copy = tensor_of(storage).fill_(7)._lazy_clone()
    del storage
    other, _ = storages.take(SIZE)
    tensor_of(other).fill_(9)
    assert (copy == 7).all()


def test_memory_is_used_again_when_nobody_has_it(storages: Storages) -> None:
    storage, _ = storages.take(SIZE)
    address = storage.data_ptr()
    del storage
    again, fresh = storages.take(SIZE)
    assert not fresh and again.data_ptr() == address
    assert storages.take(SIZE)[1], "it is in use"
    assert storages.take(SIZE + 16)[1], "of that size there is none"


def test_memory_that_was_resized_or_shared_with_other_processes_is_not_used_again(storages: Storages) -> None:
    for change in (lambda tensor: tensor.share_memory_(), lambda tensor: tensor.numpy()):
        storage, _ = storages.take(SIZE)
        change(tensor_of(storage))
        del storage
        assert storages.take(SIZE)[1]
        storages._cache.trim(0.0)  # type: ignore[union-attr]
        assert len(storages._cache) == 1, "the changed one is not kept"  # type: ignore[arg-type]
        storages._forked()
    storage, _ = storages.take(SIZE)
    storage.resize_(0)
    del storage
    again, _ = storages.take(SIZE)
    assert again.nbytes() == SIZE


def test_small_memory_and_memory_beyond_the_budget_is_not_kept(storages: Storages) -> None:
    storages.take(SIZE - 1)
    assert storages.take(SIZE - 1)[1] and storages._cache is None
    large = 65 * SIZE
    storage = storages.take(large)[0]
    del storage
    assert storages.take(large)[1]


def test_a_read_inside_the_trimming_does_not_wait(storages: Storages) -> None:
    with storages._lock:
        storage, fresh = storages.take(SIZE)
    assert fresh and storage.nbytes() == SIZE


def test_the_thread_gives_unused_memory_back_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_cache, "_TRIM_INTERVAL", 0.01)
    monkeypatch.setattr(storage_cache, "UNUSED_TIME", 0.05)
    monkeypatch.setattr(storage_cache, "LENT_TIME", 0.1)
    own = Storages()
    own.keep(lambda: 64 * SIZE)
    kept, unused = own.take(SIZE)[0], own.take(SIZE)[0]
    thread = own._thread
    del unused
    assert thread is not None
    thread.join(30)
    assert not thread.is_alive() and not own._cache and kept.nbytes() == SIZE
    own.take(SIZE)
    assert own._thread is not None and own._thread is not thread
    own.keep(int)
    assert own.take(SIZE)[1] and own._thread is None


def test_without_threads_nothing_is_kept(storages: Storages, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert storages.take(SIZE)[1] and storages.take(SIZE)[1]
    assert not storages._cache


def test_without_pytorchs_count_nothing_is_kept(storages: Storages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    assert storages.take(SIZE)[1] and storages.take(SIZE)[1]
    assert storages._thread is None


def test_a_forked_child_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    own = storage_cache.storages
    own.keep(lambda: 64 * SIZE)
    storage, _ = own.take(SIZE)
    del storage
    with own._lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads
        child = os.fork()
        if not child:
            os._exit(0 if own._thread is None and own.take(SIZE)[1] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    own.keep(int)


def there(value: Any) -> Any:
    made, _ = serialize(value)
    return deserialize(made.join() if isinstance(made, Serialized) else made)


def test_values_are_read_into_the_memory_of_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_cache, "UNUSED_TIME", 600.0)  # a busy machine may take a second for this
    monkeypatch.setattr(storage_cache, "_TRIM_INTERVAL", 600.0)
    monkeypatch.setattr(storage_cache, "_SCAN_INTERVAL", 0.0)  # and a fast one only a millisecond
    own = storage_cache.storages
    own.keep(lambda: 64 * SIZE)
    try:
        sent = {name: torch.randn(SIZE // 4 + 16 * (name % 3)) for name in range(12)}
        got = there(sent)
        places = {each.data_ptr() for each in got.values()}
        assert len(places) == 12
        other = there(sent)
        assert places.isdisjoint(each.data_ptr() for each in other.values())
        del got
        again = there({name: -tensor for name, tensor in sent.items()})
        assert {each.data_ptr() for each in again.values()} == places
        for name, tensor in sent.items():
            assert torch.equal(again[name], -tensor) and torch.equal(other[name], tensor)
            assert again[name].resize_(SIZE).shape == (SIZE,)
    finally:
        own.keep(int)


def test_values_of_ever_other_sizes_do_not_pile_up_unused() -> None:
    cache = StorageCache(1000, lambda block: not block.storage.users)
    for size in range(50, 250):
        assert cache.take(size, 0.0) is None
        made = Fake(size)
        cache.lend(size, made, 0.0)
        made.users = 0
        kept = sum(block.size for blocks in cache._blocks.values() for block in blocks)
        assert kept <= 1000 + 250 + size


class Fake:
    """A storage, and how many beside the cache have it."""

    def __init__(self, size: int) -> None:
        self.size, self.users = size, 1


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.sampled_from([3, 5, 40])),
        st.tuples(st.just("drop"), st.integers(0, 20)),
        st.tuples(st.just("share"), st.integers(0, 20)),
        st.tuples(st.just("wait"), st.sampled_from([0.001, 0.02, 0.5, 1.1, 12.0])),
        st.tuples(st.just("trim"), st.just(0)),
    ),
    max_size=60,
)


@given(STEPS)
def test_whatever_is_read_and_dropped_memory_has_one_user_and_the_budget_holds(steps: list[tuple[str, Any]]) -> None:
    cache = StorageCache(50, lambda block: not block.storage.users)
    made: list[Fake] = []
    now = 0.0
    unused_since: dict[Fake, float] = {}
    lent: dict[Fake, float] = {}
    for step, what in steps:
        if step == "read":
            found = cache.take(what, now)
            if found is None:
                found = Fake(what)
                made.append(found)
                cache.lend(what, found, now)
            else:
                assert not found.users and found.size == what
                found.users = 1
            lent[found] = now
            unused_since.pop(found, None)
        elif step == "wait":
            now += what
        elif step == "trim":
            cache.trim(now)
            kept = [block.storage for blocks in cache._blocks.values() for block in blocks]
            assert sum(each.size for each in kept if not each.users) <= 50
            assert all(now - lent[each] < LENT_TIME for each in kept if each.users)
            before, unused_since = unused_since, {}
            for each in kept:
                if not each.users:
                    unused_since[each] = before.get(each, now)
                    assert now - unused_since[each] < UNUSED_TIME
        elif made:
            chosen = made[what % len(made)]
            if chosen.users:
                chosen.users += 1 if step == "share" else -1


def test_large_tensors_are_read_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcray.common import memory
    from hpcray.protocol import out_of_band

    used: list[int] = []
    whole = memory.parallel_copy
    monkeypatch.setattr(out_of_band, "PARALLEL_COPY_SIZE", 1 << 20)
    monkeypatch.setattr(out_of_band, "copy_thread_count", lambda: 3)
    monkeypatch.setattr(out_of_band, "parallel_copy", lambda *args: (used.append(args[3]), whole(*args)))
    sent = [torch.randn((1 << 18) + 7), torch.randn((1 << 18) - 7)]
    assert all(map(torch.equal, there(sent), sent)) and used == [3]
