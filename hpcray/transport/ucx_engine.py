"""UCX: one progress engine per raylet, for object bytes and for the doorbell.

Uses the synchronous layer of ucxx (`ucxx._lib.libucxx`); its asyncio layer costs several times more per message.

The doorbell: MPI has no descriptor to sleep on. The sender of an MPI message also sends ten bytes over UCX: its rank
(u16) and how many messages it has sent to this peer so far (u64). The two wires are not ordered; from the count the
sleeper knows that a message is still on its way when the bell overtook it, and stays awake.

A failed endpoint does not mean a dead peer: it gets a new one. The first bell over that one has the number of the link,
so that the peer gives up its end of the old link too: what either has sent over that may be lost. The next bell repeats
the last one. A peer whose links go on failing is reported as dead.

UCX takes messages from whoever speaks its protocol. What is matched here carries, in its tag, a number that only the
job can know (`UcxEngine.label`): a stranger's bell or object is never matched. What nothing here receives is received
into one byte (`_Strays`), or UCX would keep it. See docs/security.md for what remains.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import re
import select
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from hpcray.common.keyed_hash import blake2b
from hpcray.transport.base import TransportError
from hpcray.transport.startup import without_planted_settings

_BELL = 1 << 60
_CLASSES, _CLASS_SHIFT = 16, 60
_STRAYS_AT_ONCE = 1000
_WHOLE_TAG = (1 << 64) - 1
_LABEL_MASK = (1 << 60) - 1
_LABEL = struct.Struct("<HHQ")
_BELL_BODY = struct.Struct("<HQ")
_PID = struct.Struct("<I")  # behind UCX's own address
_RDMA = re.compile(r"\b(rc|dc|ud|gga|srd)_?\w*/")
_RESOURCE = re.compile(r"-- *(\S+)/(\S+)")
_SETTINGS = threading.RLock()  # of UCX, which are of the process: one thread at a time loads it, or makes a context
_SLICE = 0.001  # seconds of UCX's work in one `progress`
_CHECK_PERIOD = 0.25  # seconds between two looks at the endpoints
_MAX_LINK_FAILURES = 3  # within _FAILURE_WINDOW; then the peer counts as dead
_FAILURE_WINDOW = 10.0  # seconds
_RECONNECT_TIMEOUT = 2.0  # seconds until the first bell over a new endpoint must be out
_NEW_LINK = 1 << 63  # in the count of a bell: it is not of messages but of the links that its sender has made to us

# What we ask of UCX unless the site has set it (`UCX_<name>` wins).
WANTED = {
    # Lets an endpoint with error handling use shared memory. Without error handling the death of a peer on this host,
    # while one of its objects is read, is a fatal error inside UCX that takes the reader with it. Objects are then
    # copied through shared memory by both sides at once, not by process_vm_readv: as fast, where two cores are free.
    "POSIX_ERROR_HANDLING": "y",
    "SYSV_ERROR_HANDLING": "y",
    # UCX looks after its peers every 20 s by default; a transfer with a dead one hangs until then.
    "KEEPALIVE_INTERVAL": "1s",
    # By default UCX connects over TCP inside the call that makes an endpoint. If the host has just vanished, the kernel
    # takes two minutes for that, and the raylet would answer nobody.
    "TCP_CONN_NB": "y",
}
# When it is loaded, UCX 1.21 patches eight memory functions of the C library. For each it spins 50 ms, by when other
# threads have left the old code. Threads that sleep are not in it.
_HOOK_GRACE = "UCX_MEM_BISTRO_GRACE_DURATION"
_LOOKS, _LOOK_INTERVAL = 20, 0.002  # at the threads, seconds between two
# UCX makes System V segments with mode 0660: whoever shares our group, on many sites everybody, could map them.
_NOT_PRIVATE = "sysv"
# A job of one host needs no port that other hosts could reach.
_OUTWARD = "tcp"
_RAYLET = "hpcray-raylet"
_LIBUCXX = "ucxx._lib.libucxx"


@contextmanager
def _environment_untouched() -> Iterator[None]:
    """Importing ucxx sets UCX_* variables for GPU work; MPI's own UCX and the user's programs must not see them. Other
    variables stay as they are: in a process with tensors on a device, other threads may set them meanwhile."""

    def present() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("UCX_")}

    before = present()
    try:
        yield
    finally:
        for name in present().keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _package_not_executed(name: str) -> Iterator[None]:
    """Inside, submodules of a package can be imported without what its `__init__` imports: of ucxx that is Dask, which
    takes longer than all the rest of a raylet's start."""
    spec = importlib.util.find_spec(name) if name not in sys.modules else None
    if spec is None:
        yield
        return
    sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        yield
    finally:
        del sys.modules[name]  # a program may import it later


def load() -> Any:
    """Import libucxx. Must come before the first import of `mpi4py.MPI`: of two UCX libraries in one process, the first
    one loaded serves both, and the other order ends in undefined symbols.

    Raises:
        TransportError: ucxx or the UCX library is not there, or does not load.
    """
    with _SETTINGS:
        if _LIBUCXX in sys.modules:
            return sys.modules[_LIBUCXX]
        with _environment_untouched(), without_planted_settings():
            try:
                if _other_threads_sleep_soon():
                    os.environ.setdefault(_HOOK_GRACE, "0")
                with contextlib.suppress(ModuleNotFoundError):  # where UCX is a system's, there is none
                    importlib.import_module("libucxx").load_library()
                os.environ.setdefault("UCX_MEMTYPE_CACHE", "n")  # as ucxx does
                with _package_not_executed("ucxx"):
                    return importlib.import_module(_LIBUCXX)
            except Exception as error:
                raise TransportError(f"no UCX: {type(error).__name__}: {error}") from None


def _other_threads_sleep_soon() -> bool:
    """Return True once the other threads sleep; one that has just started needs a moment to come to its wait."""
    for _ in range(_LOOKS):
        if _other_threads_sleep():
            return True
        time.sleep(_LOOK_INTERVAL)
    return False


def _other_threads_sleep() -> bool:
    """Return True if no thread of this process but the calling one computes."""
    me = str(threading.get_native_id())
    for thread in os.listdir("/proc/self/task"):
        if thread != me:
            with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{thread}/stat", "rb") as file:
                if not file.read().rpartition(b")")[2].startswith(b" S"):
                    return False
    return True


class _Strays:
    """Messages of strangers that nothing receives: their tags are of no class that is in use, or no bell of this job.

    Args:
        engine: with the worker that they come to.
        bell_tag: of this job's bells.
    """

    def __init__(self, engine: UcxEngine, bell_tag: Any) -> None:
        lib = engine.lib
        self._engine = engine
        self._bell = bell_tag.value
        self._any, self._no_bits = lib.UCXXTag(0), lib.UCXXTagMask(0)
        self._class_bits = lib.UCXXTagMask((_CLASSES - 1) << _CLASS_SHIFT)
        self._tags = {number: lib.UCXXTag(number << _CLASS_SHIFT) for number in range(_CLASSES)}
        self._under_way: list[tuple[Any, Any]] = []

    def leave(self, classes: Iterable[int]) -> None:
        """Messages of these classes are received elsewhere."""
        for number in classes:
            self._tags.pop(number, None)

    def discard(self) -> bool:
        """Receive what has come into one byte each. Returns whether there may be more."""
        probe = self._engine.worker.tag_probe
        self._under_way = [one for one in self._under_way if not one[0].completed]
        if not probe(self._any, self._no_bits, False).matched:
            return False
        room = _STRAYS_AT_ONCE
        for tag in self._tags.values():
            while room:
                found = probe(tag, self._class_bits, False)
                if not found.matched or found.sender_tag.value == self._bell:  # that one is heard in a moment
                    break
                buffer = self._engine.array(bytearray(1))
                self._under_way.append((self._engine.take(found, buffer), buffer))
                room -= 1
        return not room


class _Bells:
    """The bells of one UCX worker: those that it rings, of which some wait or are under way, and the one that it hears.

    Attributes:
        tag: of the job's bells. ringing: bells that are still in our hands, with their memory, by node.
    """

    def __init__(self, engine: UcxEngine) -> None:
        self._engine = engine
        self.tag = engine.lib.UCXXTag(_BELL | engine.label(0, 0, 0))
        self.ringing: dict[int, tuple[Any, Any]] = {}
        self._unrung: dict[int, int] = {}
        self._cut_off: list[tuple[Any, Any]] = []  # bells of broken links that UCX has not ended yet
        self._ring_buffer = bytearray(_BELL_BODY.size)
        self._ring_array = engine.array(self._ring_buffer)
        self._heard_buffer = bytearray(_BELL_BODY.size)
        self._heard_array = engine.array(self._heard_buffer)
        self._awaited = self._post()

    def _post(self) -> Any:
        return self._engine.receive(self._heard_array, self.tag)

    def ring(self, node: int, endpoint: Any, count: int) -> str:
        """Ring at a node. Returns why the link is broken, "" where it is not."""
        _BELL_BODY.pack_into(self._ring_buffer, 0, self._engine.rank, count)
        try:
            request = endpoint.tag_send(self._ring_array, self.tag)
        except Exception as error:
            return str(error) or type(error).__name__
        if not request.completed:
            self.ringing[node] = (request, self._ring_array)
            self._ring_buffer = bytearray(_BELL_BODY.size)
            self._ring_array = self._engine.array(self._ring_buffer)
        return ""

    def defer(self, node: int, count: int) -> None:
        """Keep the latest bell for a node that cannot be rung now."""
        self._unrung[node] = count

    def take_deferred(self, node: int) -> int | None:
        """Return the bell that was kept for a node; None: there is none."""
        return self._unrung.pop(node, None)

    def cut(self, node: int) -> None:
        """The link to a node is gone, and with it the bell under way."""
        self._cut_off = [bell for bell in self._cut_off if not bell[0].completed]
        if node in self.ringing:
            self._cut_off.append(self.ringing.pop(node))

    def reap(self) -> list[tuple[int, str]]:
        """Return the nodes whose bells are out of our hands, with why one was lost, or ""."""
        found = []
        for node, (request, _) in list(self.ringing.items()):
            if request.completed:
                del self.ringing[node]
                try:
                    request.check_error()
                    found.append((node, ""))
                except Exception as error:
                    found.append((node, str(error) or type(error).__name__))
        return found

    def hear(self) -> tuple[int, int] | None:
        """Return (rank, count) of the next bell that rang; None: there is none."""
        if not self._awaited.completed:
            return None
        rank, count = _BELL_BODY.unpack(self._heard_buffer)
        self._awaited = self._post()
        return rank, count

    def close(self) -> None:
        """Let go of all of them."""
        self.ringing.clear()
        self._cut_off.clear()
        self._awaited = None


class _LinkFailures:
    """The peers whose links broke: which count as dead, and which get a new one.

    Attributes:
        dead: why, by node. reconnecting: until when a new link has to be used, by node.
    """

    def __init__(self) -> None:
        self.dead: dict[int, str] = {}
        self.reconnecting: dict[int, float] = {}
        self.recent: dict[int, list[float]] = {}
        self._newly_dead: list[tuple[int, str]] = []

    def note(self, node: int, now: float) -> int:
        """A link broke. Returns how many have, lately, this one included."""
        recent = [when for when in self.recent.get(node, ()) if now - when < _FAILURE_WINDOW]
        self.recent[node] = [*recent, now]
        return len(self.recent[node])

    def give_up(self, node: int, why: str) -> None:
        """A peer is dead, as UCX shows."""
        self._newly_dead.append((node, why))

    def take_newly_dead(self) -> list[tuple[int, str]]:
        """Return those that were given up since the last call."""
        found, self._newly_dead = self._newly_dead, []
        return found


class UcxEngine:
    """UCX context, worker and endpoints. Carries the doorbell; `UcxData` adds the objects.

    Args:
        rank: own rank, which bells and transfers carry.
        secret: bytes that all ranks of the job have, and nobody else.
        one_host: whether all ranks are on this host; then there is no TCP.

    Attributes:
        rank, secret, one_host: as given; a node that joins a running job gets its rank later.
        worker: the UCX worker.
        ripe_checks: asked before a sleep: whether something of an object has come, or ended, that nobody has looked at.
            Any progress may have brought it, that of a bell too, and UCX does not wake us for it again.
        link_listeners: called with the node, the number of the link and the reason when a link breaks, at this end or
            at the node's.
        sent_counts: each returns the number of messages sent to a node so far, to ring its bell again over a new
            endpoint.

    Raises:
        TransportError: UCX does not start.
    """

    def __init__(self, rank: int, secret: bytes, one_host: bool = False) -> None:
        lib = load()
        self.rank = rank
        self.secret = secret
        self.one_host = one_host
        self._keyed = blake2b(key=secret, digest_size=8)
        self.lib = lib
        self.array: Callable[[Any], Any] = importlib.import_module("ucxx._lib.arr").Array
        self._context, self._guards_shm = make_context(lib, one_host)
        try:
            self.worker = lib.UCXWorker(self._context, False, False)
            self.worker.init_blocking_progress_mode()
        except Exception as error:
            raise TransportError(f"UCX does not start: {error}") from None
        self._fd: int = self.worker.epoll_file_descriptor
        self._endpoints: dict[int, Any] = {}
        self._peers: dict[int, tuple[Any, bool, int]] = {}  # address, whether errors are handled, pid on this host
        self._neighbors = _ProcessEnds()  # of the raylets of this host that can be seen
        self._links_made: dict[int, int] = {}
        self._failures = _LinkFailures()
        self._quiet = False  # a failure to reconnect is for us to report, not for UCX
        self._next_check = 0.0
        self._more = False
        self._moved = False
        self.ripe_checks: list[Callable[[], bool]] = []
        self.link_listeners: list[Callable[[int, int, str], None]] = []
        self.sent_counts: list[Callable[[int], int]] = []
        self._whole_tag = lib.UCXXTagMask(_WHOLE_TAG)
        self._bells = _Bells(self)
        self._strays = _Strays(self, self._bells.tag)

    def label(self, source: int, dest: int, number: int) -> int:
        """60 bits that stand for a transfer in its UCX tag; who does not know the job's secret cannot guess them.

        Args:
            source: rank that sends.
            dest: rank that receives.
            number: what tells the receiver's transfers apart.
        """
        keyed = self._keyed.copy()
        keyed.update(_LABEL.pack(source, dest, number))
        return int.from_bytes(keyed.digest(), "little") & _LABEL_MASK

    def address(self) -> bytes:
        """The worker's address, for the peers' `connect`."""
        own = bytes(memoryview(self.worker.address))  # older versions of ucxx have no `tobytes`
        return own + _PID.pack(os.getpid())

    def connect(self, node: int, address: bytes, same_host: bool) -> None:
        """Make an endpoint to a peer.

        Raises:
            TransportError: no transport of this UCX reaches it.
        """
        try:
            peer = self.lib.UCXAddress.create_from_buffer(address[: -_PID.size])
            (pid,) = _PID.unpack(address[-_PID.size :])
            self._peers[node] = peer, self._guards_shm or not same_host, pid if same_host else 0
            if same_host and _is_raylet(pid):
                self._neighbors.watch(node, pid)
            self._links_made[node] = 0
            self._make_endpoint(node)
        except Exception as error:
            self._neighbors.forget(node)
            for known in (self._peers, self._links_made):
                known.pop(node, None)
            raise TransportError(
                f"UCX finds no way to node {node}: {error}; hint: HPCRAY_DATA_PLANE=mpi does without UCX, UCX_TLS=all "
                "allows it every transport"
            ) from None
        if (count := self._bells.take_deferred(node)) is not None:
            self.ring(node, count)

    def knows(self, node: int) -> bool:
        """Return True if `connect` was called for this peer."""
        return node in self._peers

    def visit(self, address: bytes, same_host: bool) -> Any:
        """An endpoint to a UCX worker that is no peer.

        Raises:
            TransportError: no transport of this UCX reaches it.
        """
        try:
            peer = self.lib.UCXAddress.create_from_buffer(address[: -_PID.size])
            return self.lib.UCXEndpoint.create_from_worker_address(self.worker, peer, self._guards_shm or not same_host)
        except Exception as error:
            raise TransportError(f"UCX finds no way to the worker: {error}") from None

    def connected(self) -> int:
        """Number of peers that `connect` was called for."""
        return len(self._peers)

    def link(self, node: int) -> int:
        """Number of the latest link to a peer: how many have been made to it."""
        return self._links_made.get(node, 0)

    def endpoint(self, node: int) -> Any:
        """The endpoint of a peer; a new one, if its link broke.

        Raises:
            TransportError: the peer is dead, was never connected, or cannot be reached now.
        """
        endpoint = self._endpoints.get(node)
        if endpoint is not None and not endpoint.alive:
            self._fail(node, _reason(endpoint))
            endpoint = None
        if endpoint is None:
            if node in self._failures.dead or node not in self._peers:
                raise TransportError(self._failures.dead.get(node, f"node {node} is not connected"))
            self._reconnect(node)
            endpoint = self._endpoints.get(node)
        if endpoint is None:
            raise TransportError(self._failures.dead.get(node, f"the UCX link to node {node} is broken"))
        return endpoint

    def forget(self, node: int, why: str) -> None:
        """Drop a dead peer; UCX then ends its transfers with an error."""
        self._failures.dead.setdefault(node, why)
        self._neighbors.forget(node)
        self._drop_endpoint(node)

    def failed(self) -> list[tuple[int, str]]:
        """Peers that UCX newly found dead, each once. Broken links to the others are made anew."""
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now if self._strays.discard() else now + _CHECK_PERIOD
            self._reap_rings()  # a loop that never sleeps does not call `heard`
            for node, endpoint in list(self._endpoints.items()):
                if not endpoint.alive:
                    self._fail(node, _reason(endpoint))
            for node in self._neighbors.ended():  # UCX notices it late, or when something is sent there
                self._fail(node, "its process has ended")
            for node, deadline in list(self._failures.reconnecting.items()):
                if node not in self._bells.ringing:
                    del self._failures.reconnecting[node]
                elif now >= deadline:
                    self._fail(node, f"no new connection within {_RECONNECT_TIMEOUT:g} s")
            if len(self._endpoints) + len(self._failures.dead) < len(self._peers):
                for node in self._peers.keys() - self._endpoints.keys() - self._failures.dead.keys():
                    self._reconnect(node)
            elif self._quiet and not self._failures.reconnecting:
                _set_log_level("warn")
                self._quiet = False
        return self._failures.take_newly_dead()

    def _make_endpoint(self, node: int) -> None:
        peer, guarded, _ = self._peers[node]
        self._links_made[node] += 1
        self._endpoints[node] = self.lib.UCXEndpoint.create_from_worker_address(self.worker, peer, guarded)

    def _drop_endpoint(self, node: int) -> None:
        endpoint = self._endpoints.pop(node, None)
        if endpoint is not None and endpoint.alive:  # ucxx crashes when asked to close one that has failed
            endpoint.close()
        self._failures.reconnecting.pop(node, None)
        self._bells.cut(node)

    def _fail(self, node: int, why: str) -> None:
        """The link broke: a new one is made at the next check, or the peer counts as dead."""
        if node in self._failures.dead:
            return
        why = f"UCX: {why}"
        if self._failures.note(node, time.monotonic()) >= _MAX_LINK_FAILURES or _is_gone(self._peers[node][2]):
            self._failures.give_up(node, why)
            self.forget(node, why)
        else:
            self._drop_endpoint(node)
        self.link_broken(node, self.link(node), why)

    def link_broken(self, node: int, link: int, why: str) -> None:
        """Call the listeners: a link to a node broke."""
        for listener in self.link_listeners:
            listener(node, link, why)

    def ripe(self) -> bool:
        """Return True if something has come, or ended, that was not looked at yet; asked before a sleep."""
        return any(is_ripe() for is_ripe in self.ripe_checks)

    def _peer_reconnected(self, node: int, number: int) -> None:
        """The peer's end of the link is a new one."""
        made = self._links_made.get(node, 0)
        if node in self._failures.dead or not 0 < made <= number:
            return
        if made < number:
            self._drop_endpoint(node)
            self._links_made[node] = number - 1
            self._reconnect(node)
        self.link_broken(node, number - 1, "UCX: the link broke at the other end")

    def _reconnect(self, node: int) -> None:
        self._quiet = self._quiet or _set_log_level("fatal")
        try:
            self._make_endpoint(node)
        except Exception as error:
            self._fail(node, str(error))
            return
        self._bells.take_deferred(node)
        self._failures.reconnecting[node] = time.monotonic() + _RECONNECT_TIMEOUT
        self.ring(node, _NEW_LINK | self._links_made[node])
        if node in self._endpoints and (count := sum(sent(node) for sent in self.sent_counts)):
            self.ring(node, count)

    def claim(self, *classes: int) -> None:
        """Messages whose tags are of these classes (their upper four bits) are received by others than this object."""
        self._strays.leave(classes)

    def progress(self) -> bool:
        """Let UCX work until nothing moves, or for a millisecond: control messages must not wait behind an object.

        Returns:
            Whether anything moved.
        """
        once = self.worker.progress_once
        self._more = False
        if not once():
            return False
        self._moved = True
        end = time.monotonic() + _SLICE
        while once():
            if time.monotonic() > end:
                self._more = True
                break
        return True

    def hungry(self) -> bool:
        """Return True if the last `progress` stopped with work left."""
        return self._more

    def fileno(self) -> int:
        """Readable when UCX has something to do, once armed."""
        return self._fd

    def arm(self) -> bool:
        """True: the descriptor will wake us. False: UCX still has something to do, progress again."""
        armed: bool = self.worker.arm()
        if not armed and not self._moved:
            # It waits for room in the peer's queue; on a shared core the peer must run to make some.
            os.sched_yield()
        self._moved = False
        return armed

    def take(self, found: Any, buffer: Any) -> Any:
        """Receive the message that a `tag_probe` has just found and left where it was.

        By its tag: the handle that `tag_probe` can return instead makes ucxx 0.48 and older write the whole message,
        beyond the end of a shorter buffer.

        Args:
            found: what `tag_probe` returned, with nothing received since.
            buffer: from `array`. What of the message is beyond its length is lost, and the request ends with an error.

        Returns:
            The request.
        """
        return self.receive(buffer, found.sender_tag)

    def ring(self, node: int, count: int) -> None:
        """Wake `node`: we have sent it `count` messages so far. A peer not connected yet hears it then.

        While one bell is still in our hands (the peer's queue is full, it is far from asleep) later ones wait for it
        and become one.
        """
        bells, endpoint = self._bells, self._endpoints.get(node)
        if endpoint is None or node in bells.ringing:
            bells.defer(node, count)
            if endpoint is not None:
                self.worker.progress_once()
                self._reap_rings()
        elif problem := bells.ring(node, endpoint, count):
            self._fail(node, problem)

    def heard(self) -> list[tuple[int, int]]:
        """Bells that rang, as (rank, count); call after `progress`."""
        bells: list[tuple[int, int]] = []
        while (heard := self._bells.hear()) is not None:
            rank, count = heard
            if count & _NEW_LINK:
                self._peer_reconnected(rank, count ^ _NEW_LINK)
            else:
                bells.append(heard)
        if self._bells.ringing:
            self._reap_rings()
        return bells

    def receive(self, buffer: Any, tag: Any) -> Any:
        """Receive the next message with exactly this tag. Returns the request."""
        return self.worker.tag_recv(buffer, tag, self._whole_tag)

    def _reap_rings(self) -> None:
        for node, problem in self._bells.reap():
            if problem:
                self._fail(node, problem)
                continue
            self._failures.reconnecting.pop(node, None)
            if (count := self._bells.take_deferred(node)) is not None:
                self.ring(node, count)

    def resources(self) -> list[str]:
        """What UCX found to communicate with, as "transport/device"."""
        return resources_of(self._context.info)

    def close(self) -> None:
        """Close the endpoints; peers see an orderly end."""
        for endpoint in self._endpoints.values():
            if endpoint.alive:
                endpoint.close()
        for _ in range(64):
            if not self.worker.progress_once():
                break
        self._neighbors.close()
        self._endpoints.clear()
        self._peers.clear()
        self._bells.close()
        self.worker = None
        self._context = None


class _ProcessEnds:
    """Processes of this host, by node, whose ends are looked for: at all of them in one system call."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._nodes: dict[int, int] = {}  # by descriptor
        self._pids: dict[int, int] = {}  # by node, of those for which there was no descriptor

    def watch(self, node: int, pid: int) -> None:
        """Look after this process, too."""
        try:
            fd = os.pidfd_open(pid)
        except OSError:  # none is left, or the kernel is older than Linux 5.3
            self._pids[node] = pid
            return
        self._nodes[fd] = node
        self._poll.register(fd, select.POLLIN)

    def ended(self) -> list[int]:
        """The nodes whose processes have ended; each again and again until it is forgotten."""
        found = [self._nodes[fd] for fd, _ in self._poll.poll(0)] if self._nodes else []
        return [*found, *(node for node, pid in self._pids.items() if _is_gone(pid))]

    def forget(self, node: int) -> None:
        """Look after the process of this node no more."""
        self._pids.pop(node, None)
        for fd in [fd for fd, its in self._nodes.items() if its == node]:
            del self._nodes[fd]
            self._poll.unregister(fd)
            os.close(fd)

    def close(self) -> None:
        """Forget all."""
        for node in [*self._nodes.values(), *self._pids]:
            self.forget(node)


def make_context(lib: Any, one_host: bool) -> tuple[Any, bool]:
    """A UCX context as hpcray wants it, and whether endpoints on this host may have error handling.

    Args:
        lib: libucxx, from `load`.
        one_host: whether all ranks are on this host.

    Raises:
        TransportError: UCX does not start.
    """
    wanted = {name: value for name, value in WANTED.items() if "UCX_" + name not in os.environ}
    guards = not any(os.environ.get(f"UCX_{name}_ERROR_HANDLING") in ("n", "no", "0") for name in ("POSIX", "SYSV"))
    for unwanted in _unwanted(one_host):
        try:
            context = open_context(lib, wanted | ({"TLS": "^" + ",".join(unwanted)} if unwanted else {}))
        except Exception:
            continue  # an older UCX that does not know an option refuses all of them
        if not unwanted or _has_shared_memory(resources_of(context.info)):
            return context, guards
    try:
        return open_context(lib, {}), False
    except Exception as error:
        raise TransportError(f"UCX does not start: {error}") from None


def open_context(lib: Any, options: dict[str, str]) -> Any:
    """A UCX context with these options."""
    with _SETTINGS:
        return lib.UCXContext(options, (lib.Feature.TAG, lib.Feature.WAKEUP))


def _is_raylet(pid: int) -> bool:
    """True for a raylet that this process can see. In another container its pid may be free, or another process's."""
    try:
        with open(f"/proc/{pid}/comm", encoding="ascii", errors="replace") as file:
            return file.read().strip() == _RAYLET[:15]
    except OSError:
        return False


def _is_gone(pid: int) -> bool:
    """True if this process has ended; UCX would print an error about its memory. 0 is a process of another host."""
    try:
        return pid > 0 and not os.listdir(f"/proc/{pid}/fd")  # one that is not reaped yet has no files
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return True
    except OSError:  # this process has no descriptor left, for one
        return False


def _reason(endpoint: Any) -> str:
    try:
        endpoint.raise_on_error()
    except Exception as error:
        return str(error).rpartition(" error: ")[2]  # without UCX's address of the endpoint
    return "the peer closed the connection"


def resources_of(info: str) -> list[str]:
    """The "transport/device" pairs in the text of `UCXContext.info`."""
    return [f"{transport}/{device}" for transport, device in _RESOURCE.findall(info)]


def _unwanted(one_host: bool) -> list[tuple[str, ...]]:
    """Which transports to do without: the best choice first, nothing at last."""
    if "UCX_TLS" in os.environ:
        return [()]
    return [(_NOT_PRIVATE, _OUTWARD), (_OUTWARD,), ()] if one_host else [(_NOT_PRIVATE,), ()]


def _has_shared_memory(resources: list[str]) -> bool:
    return any(name.startswith(("posix/", "sysv/")) for name in resources)


def has_rdma(resources: list[str]) -> bool:
    """Whether any of them can write into another node's memory without its processor."""
    return any(_RDMA.match(name) for name in resources)


def _set_log_level(level: str) -> bool:
    """Set which of its messages UCX prints, unless the site has; True if that worked."""
    try:
        ucs = ctypes.CDLL(library_path("libucs"))
        return "UCX_LOG_LEVEL" not in os.environ and not ucs.ucs_global_opts_set_value(b"LOG_LEVEL", level.encode())
    except (OSError, AttributeError):
        return False


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, UCX prints no errors: the caller reports them."""
    with _SETTINGS:
        silenced = _set_log_level("fatal")
        try:
            yield
        finally:
            if silenced:
                _set_log_level("warn")


def library_path(name: str = "libucp") -> str:
    """The library of UCX that this process has loaded, or ""."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].strip()
            if f"/{name}." in path or f"/{name}-" in path:
                return path
    return ""
