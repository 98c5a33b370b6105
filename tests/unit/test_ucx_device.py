"""The UCX worker of a process for memory of devices: what it takes, what it does not, and that it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hpcray.transport.base import TransportError

pytest.importorskip("ucxx")
from hpcray.tensors import ucx_device
from hpcray.tensors.ucx_device import GPU_DIRECT, DeviceBuffer, DeviceWire, find_transports, tag_of

pytestmark = pytest.mark.timeout(60)
KEY, STRANGER = b"k" * 16, b"s" * 16


def buffer(content: Any) -> DeviceBuffer:
    return DeviceBuffer(content, len(content), lambda: None)


def eventually(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def wires() -> Iterator[tuple[DeviceWire, DeviceWire]]:
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    made = DeviceWire("tcp"), DeviceWire("tcp")
    made[0].address()
    yield made
    for wire in made:
        wire.close()
        wire.close()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # UCX keeps one of its own in the first test


def test_messages_pass_in_any_order_and_strangers_are_discarded(wires: tuple[DeviceWire, DeviceWire]) -> None:
    sender, receiver = wires
    address, ended = receiver.address(), []
    sizes = [1, 100, 9000, 5_000_000]
    sent = [os.urandom(size) for size in sizes]
    got = [bytearray(size) for size in sizes]
    for number, content in enumerate(got):
        receiver.expect("pull", tag_of(KEY, number), buffer(content), lambda why, n=number: ended.append((n, why)))
    for number, content in reversed(list(enumerate(sent))):
        wrong = bytearray(b"x" * len(content))
        for key in (STRANGER, KEY):
            given = wrong if key == STRANGER else bytearray(content)
            sender.send("send", "peer", address, tag_of(key, number), buffer(given), lambda why: ended.append(why))
    eventually(lambda: len(ended) == 3 * len(sizes))
    assert [bytes(one) for one in got] == sent
    assert sorted(one for one in ended if one) == [(number, "") for number in range(len(sizes))]
    assert not receiver._expected


def test_a_message_of_another_size_is_an_error_and_writes_nothing(wires: tuple[DeviceWire, DeviceWire]) -> None:
    sender, receiver = wires
    for size in (999, 1001, 2_000_000):
        ended: list[str] = []
        content = bytearray(1000)
        receiver.expect("pull", tag_of(KEY, size), buffer(content), ended.append)
        sender.send("send", "peer", receiver.address(), tag_of(KEY, size), buffer(b"x" * size), lambda why: None)
        eventually(lambda ended=ended: ended)
        assert ended == [f"{size} bytes came, 1000 were expected"] and not any(content)


def test_what_is_withdrawn_is_not_written_and_not_reported(wires: tuple[DeviceWire, DeviceWire]) -> None:
    sender, receiver = wires
    ended: list[str] = []
    first, second = bytearray(8), bytearray(8)
    receiver.expect("pull", tag_of(KEY, 0), buffer(first), ended.append)
    receiver.expect("other", tag_of(KEY, 1), buffer(second), ended.append)
    receiver.withdraw("pull")
    for number in range(2):
        sender.send("send", "peer", receiver.address(), tag_of(KEY, number), buffer(b"abcdefgh"), lambda why: None)
    eventually(lambda: ended)
    assert ended == [""] and not any(first) and bytes(second) == b"abcdefgh"


def test_memory_that_ucx_cannot_use_is_an_error_at_that_end(wires: tuple[DeviceWire, DeviceWire]) -> None:
    sender, receiver = wires

    def refuse() -> None:
        raise RuntimeError("no such device")

    ended: list[str] = []
    receiver.expect("pull", tag_of(KEY, 0), buffer(bytearray(4))._replace(use=refuse), ended.append)
    sender.send("send", "peer", receiver.address(), tag_of(KEY, 0), buffer(b"abcd"), lambda why: None)
    eventually(lambda: ended)
    sender.send("send", "peer", receiver.address(), tag_of(KEY, 1), buffer(b"abcd")._replace(use=refuse), ended.append)
    sender.send("send", "peer", b"no address at all", tag_of(KEY, 1), buffer(b"abcd"), ended.append)
    sender.send("send", "peer", b"", tag_of(KEY, 1), buffer(b"abcd"), ended.append)
    eventually(lambda: len(ended) >= 2)
    assert ended[:2] == ["no such device"] * 2


def test_a_receiver_that_is_gone_is_an_error_and_closing_does_not_wait_for_it() -> None:
    sender, receiver = DeviceWire("tcp"), DeviceWire("tcp")
    ended: list[str] = []
    got = bytearray(8)
    receiver.expect("pull", tag_of(KEY, 0), buffer(got), ended.append)
    sender.send("send", "peer", receiver.address(), tag_of(KEY, 0), buffer(b"abcdefgh"), lambda why: None)
    eventually(lambda: ended)
    address = receiver.address()
    receiver.close()
    began = time.monotonic()
    sender.send("send", "peer", address, tag_of(KEY, 1), buffer(bytearray(50_000_000)), ended.append)
    time.sleep(0.1)
    sender.close()
    assert time.monotonic() - began < 5.0


@pytest.mark.parametrize("transports", ["rc,dc,cuda_copy,gdr_copy", "no_such_transport"])
def test_without_its_transports_there_is_a_reason_and_no_staging(transports: str) -> None:
    wire = DeviceWire(transports)
    ended: list[str] = []
    try:
        with pytest.raises(TransportError, match="UCX has no transport of"):
            wire.address()
        wire.expect("pull", 1, buffer(bytearray(4)), ended.append)
        wire.send("send", "peer", b"", 1, buffer(b"abcd"), ended.append)
        eventually(lambda: len(ended) == 2)
        assert all("UCX has no transport of" in why for why in ended)
    finally:
        wire.close()


def test_an_error_in_the_thread_is_an_answer_for_all(wires: tuple[DeviceWire, DeviceWire]) -> None:
    wire, _ = wires
    ended: list[str] = []
    wire.expect("pull", 1, buffer(bytearray(4)), ended.append)
    wire._do(lambda: 1 // 0)
    eventually(lambda: ended)
    wire.expect("pull", 2, buffer(bytearray(4)), ended.append)
    eventually(lambda: len(ended) == 2)
    assert all("ZeroDivisionError" in why for why in ended)
    with pytest.raises(TransportError, match="ZeroDivisionError"):
        wire.address()


def test_transports_are_those_of_gpudirect_where_there_is_an_adapter(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucx_device, "_ADAPTERS", tmp_path / "missing")
    assert find_transports("auto") == ("", "this host has no RDMA adapter")
    (tmp_path / "missing").mkdir()
    assert find_transports("auto")[0] == ""
    (tmp_path / "missing" / "mlx5_0").mkdir()
    assert find_transports("auto") == (GPU_DIRECT, "")
    assert find_transports("none") == ("", "HPCRAY_DEVICE_TRANSPORTS=none")
    assert find_transports("tcp,sm") == ("tcp,sm", "")


def test_tags_are_different_for_keys_and_messages() -> None:
    found = {tag_of(key, message) for key in (KEY, STRANGER) for message in range(1000)}
    assert len(found) == 2000 and max(found) < 1 << 64


def test_threads_that_load_ucx_at_once_get_the_same_whole_library() -> None:
    program = """
from hpcray.tensors.ucx_device import DeviceWire
wires = [DeviceWire("tcp") for _ in range(8)]
assert all(wire.address() for wire in wires)
for wire in wires:
    wire.close()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)
