"""Collectives of PyTorch tensors on GPUs, by NCCL.

The ranks find each other through the same rendezvous as those of `StoreGroup`; hpcray opens no port (NCCL does).
Operations are work of the current stream: a call returns before they are done, as with Ray's and PyTorch's. A thread
looks after those that are not done; where one takes longer than the group's timeout, as its peer is dead, or NCCL
reports an error, it aborts the communicator, so that the work of the stream ends, and later calls raise.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hpcray.tensors import nccl_library
from hpcray.tensors.nccl_library import DATA_TYPES, IN_PROGRESS, Nccl, NcclError, NcclLibrary
from hpcray.util.collective.groups import Membership, ReduceOp, is_torch

_POLL_INTERVAL = 0.0005  # seconds, while a call is in progress
_WATCH_INTERVAL = 0.2  # seconds
_OPS = {
    ReduceOp.SUM: nccl_library.SUM,
    ReduceOp.PRODUCT: nccl_library.PRODUCT,
    ReduceOp.MIN: nccl_library.MIN,
    ReduceOp.MAX: nccl_library.MAX,
    ReduceOp.AVERAGE: nccl_library.AVERAGE,
}


class Streams:
    """The current stream of PyTorch's current CUDA device."""

    def device(self) -> str:
        """Return the device on which a communicator is made."""
        import torch

        return f"cuda:{torch.cuda.current_device()}"

    def current(self) -> int:
        """Return the handle of the current stream."""
        import torch

        return int(torch.cuda.current_stream().cuda_stream)

    def mark(self) -> Callable[[], bool]:
        """Return a function that returns True when the work that the current stream has now is done."""
        import torch

        event = torch.cuda.Event()
        event.record()
        query: Callable[[], bool] = event.query
        return query

    def synchronize(self) -> None:
        """Wait until the work that the current stream has now is done."""
        import torch

        torch.cuda.current_stream().synchronize()


class _Parts:
    """NCCL and the streams of this process."""

    library: Nccl | None = None
    streams: Any = None


def use_nccl(library: Nccl | None, streams: Any = None) -> None:
    """Use another NCCL in this process, for groups that are joined from now on; None: NCCL itself."""
    _Parts.library, _Parts.streams = library, streams


def nccl_available() -> bool:
    """Return True if this process has PyTorch, NCCL and a GPU."""
    if _Parts.library is not None:
        return True
    try:
        import torch
    except ImportError:
        return False
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return False
    try:
        NcclLibrary()
    except NcclError:
        return False
    return True


class NcclGroup:
    """Membership of one rank in a group of PyTorch tensors on GPUs.

    Args:
        name: name of the group.
        world_size, rank: as in MPI. No two ranks may have the same GPU.
        timeout: seconds that the other ranks may take to join, and that an operation may take.

    Raises:
        RuntimeError: the other ranks did not join within `timeout`, or NCCL refuses.
    """

    def __init__(self, name: str, world_size: int, rank: int, timeout: float) -> None:
        self.name, self.world_size, self.rank = name, world_size, rank
        self._timeout = timeout
        self._broken = ""
        self._comm: Any = None
        self._lock = threading.Lock()
        self._under_way: deque[tuple[float, str, Callable[[], bool]]] = deque()
        self._thread: threading.Thread | None = None
        self._end = threading.Event()
        self._members = Membership(name, world_size, rank, timeout)
        try:
            self._nccl: Nccl = _Parts.library if _Parts.library is not None else NcclLibrary()
            self._streams = _Parts.streams if _Parts.library is not None else Streams()
            self._device = self._streams.device()
            given = self._members.exchange("id", self._nccl.new_id() if rank == 0 else None)
            self._comm, code = self._nccl.init(world_size, rank, given[0])
            self._settle("join", code)
        except NcclError as error:
            self._members.destroy()
            raise RuntimeError(f"the collective group {name!r} cannot use NCCL: {error}") from error
        except RuntimeError:
            self._members.destroy()
            raise

    def destroy(self) -> None:
        """Leave the group. Operations that are under way end first, or with the group's timeout."""
        deadline = time.monotonic() + self._timeout
        while self._under_way and not self._broken and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL)
            self._look()
        self._end.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            comm, self._comm = self._comm, None
            if comm is not None and not self._broken:
                if self._under_way:
                    self._nccl.abort(comm)
                else:
                    self._nccl.destroy(comm)
            self._broken = self._broken or "this process has left it"
        self._members.destroy()

    def barrier(self) -> None:
        """Wait for all ranks, and for the work of the current stream."""
        import torch

        self.allreduce(torch.zeros(1, device=self._device), ReduceOp.SUM)
        self._streams.synchronize()

    def allreduce(self, tensor: Any, op: ReduceOp) -> None:
        """Reduce in place on all ranks."""
        flat = self._flat(tensor)
        self._run("allreduce", ("AllReduce", _at(flat), _at(flat), flat.numel(), _kind(flat), _op(flat, op)))
        _put_back(tensor, flat)

    def reduce(self, tensor: Any, root: int, op: ReduceOp) -> None:
        """Reduce in place on rank `root`; the tensors of the other ranks do not change."""
        flat = self._flat(tensor)
        result = flat if self.rank == root else flat.new_empty(0)
        self._run("reduce", ("Reduce", _at(flat), _at(result), flat.numel(), _kind(flat), _op(flat, op), root))
        if self.rank == root:
            _put_back(tensor, flat)

    def broadcast(self, tensor: Any, root: int) -> None:
        """Copy the tensor of rank `root` in place."""
        flat = self._flat(tensor)
        self._run("broadcast", ("Broadcast", _at(flat), _at(flat), flat.numel(), _kind(flat), root))
        _put_back(tensor, flat)

    def allgather(self, tensors: list[Any], tensor: Any) -> None:
        """Gather the tensors of all ranks into `tensors`, by rank."""
        flat = self._flat(tensor)
        self._check_parts("allgather", tensors, flat)
        whole = flat.new_empty(self.world_size * flat.numel())
        self._run("allgather", ("AllGather", _at(flat), _at(whole), flat.numel(), _kind(flat)))
        if flat.numel():
            for mine, part in zip(tensors, whole.split(flat.numel()), strict=True):
                _put_back(mine, part)

    def reducescatter(self, tensor: Any, tensors: list[Any], op: ReduceOp) -> None:
        """Reduce `tensors` of all ranks into `tensor`, this rank's part."""
        import torch

        flat = self._flat(tensor)
        self._check_parts("reducescatter", tensors, flat)
        whole = torch.cat([self._flat(part) for part in tensors])
        self._run("reducescatter", ("ReduceScatter", _at(whole), _at(flat), flat.numel(), _kind(flat), _op(flat, op)))
        _put_back(tensor, flat)

    def gather(self, tensor: Any, tensors: list[Any] | None, root: int) -> None:
        """Gather the tensors of all ranks into `tensors` of rank `root`, by rank."""
        self._exchange("gather", {root: tensor}, dict(enumerate(tensors or ())) if self.rank == root else {})

    def scatter(self, tensor: Any, tensors: list[Any] | None, root: int) -> None:
        """Copy of `tensors` of rank `root` the one at this rank's index."""
        self._exchange("scatter", dict(enumerate(tensors or ())) if self.rank == root else {}, {root: tensor})

    def alltoall(self, tensors: list[Any], given: list[Any]) -> None:
        """Copy into `tensors` what each rank has given for this one, by rank."""
        self._exchange("alltoall", dict(enumerate(given)), dict(enumerate(tensors)))

    def send(self, tensor: Any, to: int) -> None:
        """Send a tensor to another rank."""
        self._exchange("send", {to: tensor}, {})

    def recv(self, tensor: Any, source: int) -> None:
        """Receive a tensor from another rank, in place."""
        self._exchange("recv", {}, {source: tensor})

    def _exchange(self, what: str, sent: dict[int, Any], received: dict[int, Any]) -> None:
        """Send tensors to ranks and receive others from ranks, all at once."""
        out = {to: self._flat(tensor) for to, tensor in sent.items()}
        into = {source: self._flat(tensor) for source, tensor in received.items()}
        calls: list[tuple[Any, ...]] = []
        for to, flat in out.items():
            calls.append(("Send", _at(flat), flat.numel(), _kind(flat), to))
        for source, flat in into.items():
            calls.append(("Recv", _at(flat), flat.numel(), _kind(flat), source))
        self._run(what, *calls)
        for source, flat in into.items():
            _put_back(received[source], flat)

    # ------------------------------------------------------------ calls of NCCL

    def _flat(self, tensor: Any) -> Any:
        """The elements of a tensor in one row: its own memory, where they are in a row there.

        Raises:
            RuntimeError: it is not on the device of this group, or NCCL does not know its dtype.
        """
        if not is_torch(tensor) or not self._is_here(tensor):
            where = tensor.device if is_torch(tensor) else "the host"
            raise RuntimeError(
                f"the collective group {self.name!r} is of tensors on {self._device}, this one is on {where}; "
                "hint: Backend.GLOO for arrays and tensors of the host"
            )
        if str(tensor.dtype).removeprefix("torch.") not in DATA_TYPES:
            raise RuntimeError(
                f"NCCL does not know {tensor.dtype}; hint: tensor.view() of a dtype of the same size, or another dtype"
            )
        return tensor.detach().contiguous().view(-1)

    def _is_here(self, tensor: Any) -> bool:
        return bool(str(tensor.device) == self._device)

    def _check_parts(self, what: str, tensors: list[Any], flat: Any) -> None:
        for part in tensors:
            if not is_torch(part) or part.numel() != flat.numel() or part.dtype != flat.dtype:
                raise RuntimeError(f"{what}: all tensors need {flat.numel()} elements of {flat.dtype}")

    def _run(self, what: str, *calls: tuple[Any, ...]) -> None:
        """Queue operations that run together."""
        with self._lock:
            self._check(what)
            stream = self._streams.current()
            if len(calls) == 1:
                name, *args = calls[0]
                self._settle(what, self._nccl.call(name, self._comm, stream, *args))
            else:
                self._settle(what, self._nccl.group_start())
                codes = [self._nccl.call(name, self._comm, stream, *args) for name, *args in calls]
                end = self._nccl.group_end()  # also after an error, or the next group never begins
                self._settle(what, next((code for code in codes if code not in (0, IN_PROGRESS)), end))
            self._under_way.append((time.monotonic() + self._timeout, what, self._streams.mark()))
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="hpcray-nccl", daemon=True)
                self._thread.start()

    def _check(self, what: str) -> None:
        if self._broken:
            raise RuntimeError(f"{what}: the collective group {self.name!r} has ended: {self._broken}")

    def _settle(self, what: str, code: int) -> None:
        """Wait until a call that may be in progress has been made."""
        deadline = time.monotonic() + self._timeout
        while code == IN_PROGRESS and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL)
            code = self._nccl.state(self._comm)
        if code == 0:
            return
        text = (
            f"rank {self.rank} of {self.world_size} waited {self._timeout:g} s in {what}; hint: every rank has to call "
            "the same operations in the same order, gloo_timeout says how long they may take (ms)"
            if code == IN_PROGRESS
            else f"{what} failed: {self._nccl.error_text(code)}; hint: NCCL_DEBUG=WARN, and one GPU for each rank"
        )
        self._break(text)
        self._check(what)

    def _break(self, text: str) -> None:
        """Give the communicator up, so that operations under way end (lock held, or none can be under way)."""
        if not self._broken:
            self._broken = text
            comm, self._comm = self._comm, None
            self._under_way.clear()
            if comm is not None:
                self._nccl.abort(comm)

    # ------------------------------------------------------------ the thread

    def _look(self) -> None:
        """Forget operations that are done; break the group where one takes too long, or NCCL reports an error."""
        with self._lock:
            while self._under_way and self._under_way[0][2]():
                self._under_way.popleft()
            if self._broken or self._comm is None or not self._under_way:
                return
            code = self._nccl.state(self._comm)
            deadline, what, _ = self._under_way[0]
            if code not in (0, IN_PROGRESS):
                self._break(f"{what} failed: {self._nccl.error_text(code)}")
            elif time.monotonic() > deadline:
                self._break(
                    f"{what} was not done after {self._timeout:g} s; hint: a rank that has died, or does not call it "
                    "(gloo_timeout says how long an operation may take, in ms)"
                )

    def _watch(self) -> None:
        while not self._end.wait(_WATCH_INTERVAL):
            self._look()


def _at(flat: Any) -> int:
    return int(flat.data_ptr())


def _kind(flat: Any) -> int:
    return DATA_TYPES[str(flat.dtype).removeprefix("torch.")]


def _op(flat: Any, op: ReduceOp) -> int:
    return nccl_library.MAX if op is ReduceOp.SUM and "bool" in str(flat.dtype) else _OPS[op]  # a sum would be no bool


def _put_back(tensor: Any, flat: Any) -> None:
    """Have `tensor` hold the elements of `flat`, where these are not in its own memory."""
    import torch

    if flat.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        with torch.no_grad():
            tensor.copy_(flat.view(tensor.shape))
