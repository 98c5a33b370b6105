"""Bytes from a device of one process to a device of another one: a UCX worker of the process itself, in its own thread.

Made when the first tensors pass this way, never before: a process without such tensors loads no UCX. Nothing of UCX is
called by another thread.

The transports are those that are named, and no others: where RDMA adapters do not reach the memory of GPUs, UCX would
copy it through the host by itself, at 0.8 GB/s. It has to do without such adapters instead, and finds none.

As in `ucx_data`, nothing is received before it has come. What comes is matched by its whole tag, 64 bits that are made
from a key that only the two processes know; all else is received into one byte, and so discarded.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hpcray.common.keyed_hash import blake2b
from hpcray.transport.base import TransportError
from hpcray.transport.ucx_engine import WANTED, load, open_context, quiet

GPU_DIRECT = "rc,dc,cuda_copy,gdr_copy"
"""Transports that reach the memory of GPUs, and what they need for small messages."""
_ADAPTERS = Path("/sys/class/infiniband")
_WHOLE_TAG = (1 << 64) - 1
_OPEN_TIME = 30.0
"""Seconds until UCX has started, or is given up."""
_BUSY, _EXPECTING, _IDLE = 0.002, 0.05, 1.0
"""Seconds between two looks at UCX: its descriptor does not wake us for all transports."""
_CLOSE_TIME = 1.0
"""Seconds that UCX has to end what is under way when the process ends."""
_CLONE_FS = 0x200
"""Flag of `unshare`: the working directory of a thread becomes its own."""
_PER_LOOK = 256
"""Messages that are matched before what has come is looked at again."""

Done = Callable[[str], object]
"""Called with the reason why a message did not pass; "": it did."""


def find_transports(setting: str) -> tuple[str, str]:
    """Return the UCX transports by which device memory leaves this host; "" and the reason where it does not.

    Looks at files only, and loads nothing.

    Args:
        setting: "none", "auto", or UCX transports.
    """
    if setting == "none":
        return "", "HPCRAY_DEVICE_TRANSPORTS=none"
    if setting != "auto":
        return setting, ""
    try:
        adapters = os.listdir(_ADAPTERS)
    except OSError:
        adapters = []
    return (GPU_DIRECT, "") if adapters else ("", "this host has no RDMA adapter")


def tag_of(key: bytes, message: int) -> int:
    """Return the tag of a message.

    Args:
        key: 16 bytes that only the two processes know. message: its number.
    """
    return int.from_bytes(blake2b(message.to_bytes(4, "big"), key=key, digest_size=8).digest(), "little")


class DeviceBuffer(NamedTuple):
    """Memory that is sent, or received into.

    content: for `ucxx`: a buffer, or what has `__cuda_array_interface__`. size: in bytes. use: called before UCX gets
    to know of it, in the thread of UCX.
    """

    content: Any
    size: int
    use: Callable[[], object]


class _Flight(NamedTuple):
    """A message under way. owner: whose it is; None: it was withdrawn. array: what UCX uses until then."""

    request: Any
    owner: Hashable
    done: Done | None
    array: Any


class _Expected(NamedTuple):
    buffer: DeviceBuffer
    owner: Hashable
    done: Done


class DeviceWire:
    """The UCX worker of a process for memory of devices, and its thread.

    All methods may be called by any thread, and wait for nothing but `address`. `done` callbacks are called by the
    thread of UCX.

    Args:
        transports: of UCX, as in UCX_TLS.
    """

    def __init__(self, transports: str) -> None:
        self._transports = transports
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._kick = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._kicking = threading.Lock()  # the descriptor is not closed meanwhile
        self._closed = False
        self._opened, self._ended = threading.Event(), False
        self._problem, self._address = "", b""
        self._lib: Any = None
        self._context: Any = None
        self._worker: Any = None
        self._array: Callable[[Any], Any] = memoryview
        self._endpoints: dict[Hashable, Any] = {}
        self._expected: dict[int, _Expected] = {}
        self._flights: list[_Flight] = []
        self._thread = threading.Thread(target=self._run, name="hpcray-device-wire", daemon=True)
        self._thread.start()

    def address(self) -> bytes:
        """Return the address by which others send to this process.

        Raises:
            TransportError: UCX does not start, or has none of the transports.
        """
        if not self._opened.wait(_OPEN_TIME):
            raise TransportError(f"UCX has not started within {_OPEN_TIME:g} s")
        if self._problem:
            raise TransportError(self._problem)
        return self._address

    def expect(self, owner: Hashable, tag: int, buffer: DeviceBuffer, done: Done) -> None:
        """Receive a message when it comes. It must have as many bytes as the buffer."""
        self._do(partial(self._expect, tag, _Expected(buffer, owner, done)))

    def send(self, owner: Hashable, peer: Hashable, address: bytes, tag: int, buffer: DeviceBuffer, done: Done) -> None:
        """Send a message.

        Args:
            owner: whose message it is. peer: the process that gets it, whose address this is.
        """
        self._do(partial(self._send, owner, peer, address, tag, buffer, done))

    def withdraw(self, owner: Hashable) -> None:
        """Expect nothing for an owner any more; what is under way ends as it does, without a call of `done`.

        UCX uses the buffers until then.
        """
        self._do(partial(self._withdraw, owner))

    def forget(self, peer: Hashable) -> None:
        """Drop a process that is dead."""
        self._do(partial(self._forget, peer))

    def close(self) -> None:
        """End the thread; UCX uses no buffer any more then."""
        self._do(self._end)
        self._thread.join()

    def _do(self, call: Callable[[], object]) -> None:
        self._commands.put(call)
        with self._kicking:
            if not self._closed:
                os.eventfd_write(self._kick, 1)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._open()
        except Exception as error:
            self._problem = str(error) or type(error).__name__
        self._opened.set()
        while not self._ended:
            try:
                self._loop()
            except Exception as error:
                self._fail(f"UCX: {type(error).__name__}: {error}")
        self._close()

    def _fail(self, why: str) -> None:
        """Give up UCX: nothing passes any more, which is the answer to all."""
        self._problem = self._problem or why
        waiting = [*(one.done for one in self._expected.values()), *(flight.done for flight in self._flights)]
        self._close_worker()
        for done in waiting:
            if done is not None:
                done(why)

    def _open(self) -> None:
        # This thread alone goes elsewhere (`without_planted_settings`): others may use the working directory meanwhile.
        ctypes.CDLL(None).unshare(_CLONE_FS)
        self._lib = lib = load()
        self._array = importlib.import_module("ucxx._lib.arr").Array
        config = {"TLS": self._transports}
        if "rc" in self._transports or "dc" in self._transports:
            config["IB_GPU_DIRECT_RDMA"] = "y"
        wanted = WANTED | config
        given = {name: value for name, value in wanted.items() if name == "TLS" or "UCX_" + name not in os.environ}
        try:
            with quiet():
                self._context = open_context(lib, given)
                self._worker = lib.UCXWorker(self._context, False, False)
                self._worker.init_blocking_progress_mode()
        except Exception as error:
            self._worker = self._context = None
            raise TransportError(f"UCX has no transport of {self._transports} for this: {error}") from None
        self._any, self._none = lib.UCXXTag(0), lib.UCXXTagMask(0)
        self._whole = lib.UCXXTagMask(_WHOLE_TAG)
        self._address = bytes(memoryview(self._worker.address))  # older versions of ucxx have no `tobytes`

    def _loop(self) -> None:
        poll = select.poll()
        poll.register(self._kick, select.POLLIN)
        if self._worker is not None:
            poll.register(self._worker.epoll_file_descriptor, select.POLLIN)
        while not self._ended:
            if not self._run_commands():
                return
            if self._worker is None:
                poll.poll()
            elif not self._progress():
                if self._worker.arm():
                    poll.poll(1000 * self._pause())
                else:
                    os.sched_yield()  # it waits for the other end, which may need this core
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._kick)

    def _pause(self) -> float:
        return _BUSY if self._flights else _EXPECTING if self._expected else _IDLE

    def _run_commands(self) -> bool:
        """Run the commands of other threads. Returns False at the end."""
        while True:
            try:
                call = self._commands.get_nowait()
            except queue.Empty:
                return not self._ended
            call()

    def _progress(self) -> bool:
        """Have UCX work once, and look at what has come. Returns whether anything moved."""
        moved = bool(self._worker.progress_once())
        moved = self._match() or moved
        return self._land() or moved

    def _match(self) -> bool:
        worker, any_came = self._worker, False
        for _ in range(_PER_LOOK):
            found = worker.tag_probe(self._any, self._none, False)
            if not found.matched:
                break
            any_came = True
            tag = found.sender_tag.value
            if tag not in self._expected:
                self._run_commands()  # it may have been announced just now
            one = self._expected.pop(tag, None)
            if one is None or one.buffer.size != found.length:
                if one is not None:
                    one.done(f"{found.length} bytes came, {one.buffer.size} were expected")
                one = _Expected(DeviceBuffer(bytearray(1), 1, _nothing), None, _ignore)
            self._receive(found.sender_tag, one)
        return any_came

    def _receive(self, tag: Any, one: _Expected) -> None:
        try:
            one.buffer.use()
            array = self._array(one.buffer.content)
        except Exception as error:
            one.done(str(error))
            one = _Expected(one.buffer, None, _ignore)
            array = self._array(bytearray(1))
        # By its tag, as in `UcxEngine.take`.
        request = self._worker.tag_recv(array, tag, self._whole)
        self._flights.append(_Flight(request, one.owner, one.done, array))

    def _land(self) -> bool:
        ended = [flight for flight in self._flights if flight.request.completed]
        if not ended:
            return False
        self._flights = [flight for flight in self._flights if not flight.request.completed]
        for flight in ended:
            if flight.done is None:
                continue
            reason = ""
            try:
                flight.request.check_error()
            except Exception as error:
                reason = str(error) or type(error).__name__
            flight.done(reason)
        return True

    def _expect(self, tag: int, one: _Expected) -> None:
        if self._worker is None:
            one.done(self._problem)
        else:
            self._expected[tag] = one

    def _send(
        self, owner: Hashable, peer: Hashable, address: bytes, tag: int, buffer: DeviceBuffer, done: Done
    ) -> None:
        try:
            if self._worker is None:
                raise TransportError(self._problem)
            buffer.use()
            array = self._array(buffer.content)
            request = self._endpoint(peer, address).tag_send(array, self._lib.UCXXTag(tag))
        except Exception as error:
            done(str(error) or type(error).__name__)
            return
        self._flights.append(_Flight(request, owner, done, array))

    def _endpoint(self, peer: Hashable, address: bytes) -> Any:
        endpoint = self._endpoints.get(peer)
        if endpoint is None or not endpoint.alive:
            with quiet():
                remote = self._lib.UCXAddress.create_from_buffer(address)
                endpoint = self._lib.UCXEndpoint.create_from_worker_address(self._worker, remote, True)
            self._endpoints[peer] = endpoint
        return endpoint

    def _withdraw(self, owner: Hashable) -> None:
        for tag in [tag for tag, one in self._expected.items() if one.owner == owner]:
            del self._expected[tag]
        self._flights = [
            flight._replace(owner=None, done=None) if flight.owner == owner else flight for flight in self._flights
        ]

    def _forget(self, peer: Hashable) -> None:
        endpoint = self._endpoints.pop(peer, None)
        if endpoint is not None:
            _close_endpoint(endpoint)

    def _end(self) -> None:
        self._ended = True

    def _close(self) -> None:
        self._close_worker()
        with self._kicking:
            self._closed = True
            os.close(self._kick)

    def _close_worker(self) -> None:
        self._expected.clear()
        flights, self._flights = self._flights, []
        worker, self._worker = self._worker, None
        endpoints, self._endpoints = self._endpoints, {}
        if worker is None:
            return
        for endpoint in endpoints.values():
            with contextlib.suppress(Exception):
                _close_endpoint(endpoint)
        end = time.monotonic() + _CLOSE_TIME
        with contextlib.suppress(Exception):
            if any(not flight.request.completed for flight in flights):
                worker.cancel_inflight_requests()
            while worker.progress_once() or any(not flight.request.completed for flight in flights):
                if time.monotonic() > end:
                    break
        endpoints.clear()
        self._context = worker = None
        flights.clear()  # after the worker: it may write to their buffers until it is gone


def _close_endpoint(endpoint: Any) -> None:
    if endpoint.alive:  # ucxx crashes when asked to close one that has failed
        endpoint.close_blocking()


def _nothing() -> None:
    """Prepare nothing for memory of the host."""


def _ignore(reason: str) -> None:
    """Discard a message."""
