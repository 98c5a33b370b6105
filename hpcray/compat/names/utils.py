"""`ray._private.utils` and `ray._common.utils`."""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import importlib
import inspect
import io
import os
import random
import re
import signal
import socket
import string
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar

from hpcray.api.options import requested_amounts
from hpcray.platform import resource_limits
from hpcray.platform.session_directory import session_root
from hpcray.platform.sockets import node_ip_address

INT32_MAX = (1 << 31) - 1
PLACEMENT_GROUP_BUNDLE_RESOURCE_NAME = "bundle"
_ALPHABET = string.ascii_lowercase + string.digits

T = TypeVar("T")
_background_tasks = set[asyncio.Task[Any]]()


def get_ray_temp_dir() -> str:
    """Return the directory of this user's session directories on this node."""
    return session_root(os.environ)


get_default_ray_temp_dir = get_ray_temp_dir


def get_user_temp_dir() -> str:
    """Return the directory for temporary files, the parent of `get_ray_temp_dir()`."""
    return os.path.dirname(session_root(os.environ))


def get_default_system_temp_dir() -> str:
    """Return the directory for temporary files that variables name, or `/tmp`."""
    return os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"


def get_system_memory() -> int:
    """Return the memory that this node may use, in bytes."""
    return int(resource_limits.usable_memory())


def get_used_memory() -> int:
    """Return the memory in use, in bytes: of the machine, or of the cgroup whose limit is nearer."""
    return resource_limits.MemoryGauge().read((), 0).used


def estimate_available_memory() -> int:
    """Return how many bytes of `get_system_memory` are not in use."""
    return max(0, get_system_memory() - get_used_memory())


def get_num_cpus() -> int:
    return int(resource_limits.cpus_per_rank(1))


hex_to_binary = binascii.unhexlify
is_async_func = inspect.iscoroutinefunction


def binary_to_hex(data: bytes) -> str:
    return data.hex()


def decode(text: Any, allow_none: bool = False, encode_type: str = "utf-8") -> str:
    """Decode bytes as text; text is returned unchanged."""
    if text is None and allow_none:
        return ""
    return text.decode(encode_type) if isinstance(text, bytes) else str(text)


def get_or_create_event_loop() -> asyncio.AbstractEventLoop:
    """Return this thread's running event loop, else its current one, else a new one that becomes the current."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        pass
    try:
        return asyncio.get_event_loop_policy().get_event_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop


def run_background_task(coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a coroutine on this thread's event loop, and keep its task alive until it has ended."""
    task = get_or_create_event_loop().create_task(coroutine)
    _background_tasks.add(task)
    task.add_done_callback(_background_tasks.discard)
    return task


def import_module_and_attr(full_path: str, *, reload_module: bool = False) -> tuple[ModuleType, Any]:
    """Import what a text names.

    Args:
        full_path: `module:name` or `module.name`.
        reload_module: execute the module again, where it was imported before.

    Returns:
        The module and the attribute.

    Raises:
        ValueError: the text has several colons.
    """
    if full_path.count(":") > 1:
        raise ValueError(f'Got invalid import path "{full_path}". An import path may have at most one colon.')
    name, _, attribute = full_path.rpartition(":" if ":" in full_path else ".")
    module = importlib.import_module(name)
    if reload_module:
        importlib.reload(module)
    return module, getattr(module, attribute)


def import_attr(full_path: str, *, reload_module: bool = False) -> Any:
    """Import what `module:name` or `module.name` names."""
    return import_module_and_attr(full_path, reload_module=reload_module)[1]


def load_class(path: str) -> Any:
    """Import the class that `module.name` names.

    Raises:
        ValueError: the text has no dot.
    """
    if "." not in path:
        raise ValueError("You need to pass a valid path like mymodule.provider_class")
    return import_attr(path)


def get_function_args(callable: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters of a function."""
    return list(inspect.signature(callable).parameters)


def get_random_alphanumeric_string(length: int) -> str:
    """Return random lower-case ASCII letters and digits."""
    return "".join(random.choices(_ALPHABET, k=length))


def get_ray_address_file(temp_dir: str | None) -> str:
    """Return the file in which Ray keeps the address of its last cluster. hpcray writes none."""
    return os.path.join(temp_dir or get_ray_temp_dir(), "ray_current_cluster")


def reset_ray_address(temp_dir: str | None = None) -> None:
    """Remove the file of `get_ray_address_file`, which a Ray on this machine may have left."""
    Path(get_ray_address_file(temp_dir)).unlink(missing_ok=True)


def try_to_create_directory(directory_path: str) -> None:
    """Make a directory that no other user can read, and those above it; one that exists stays as it is."""
    os.makedirs(os.path.expanduser(directory_path), mode=0o700, exist_ok=True)


def resources_from_ray_options(options_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resources that a task with these options requests.

    Raises:
        ValueError: `resources` has a name that is an option of its own, or is reserved.
    """
    resources = options_dict.get("resources") or {}
    for names in (("CPU", "GPU"), ("memory", "object_store_memory")):
        if any(name in resources for name in names):
            raise ValueError(f"The resources dictionary must not contain the key '{names[0]}' or '{names[1]}'")
    if PLACEMENT_GROUP_BUNDLE_RESOURCE_NAME in resources:
        raise ValueError(f"The resource should not include `bundle` which is reserved for Ray. resources: {resources}")
    store = options_dict.get("object_store_memory")
    return requested_amounts(options_dict.get) | ({} if store is None else {"object_store_memory": store})


class TimerBase(ABC):
    """A clock that tests can replace."""

    @abstractmethod
    def time(self) -> float:
        """Return the time in seconds."""


class Timer(TimerBase):
    """The clock of this computer."""

    def time(self) -> float:
        """Return the seconds since 1970."""
        return time.time()


# ------------------------------------------------------------ ray._private.utils alone


def format_error_message(exception_message: str, task_exception: bool = False) -> str:
    """Return a traceback's text; with `task_exception` without its second and third line, which name the worker."""
    lines = exception_message.split("\n")
    return "\n".join(lines[:1] + lines[3:] if task_exception else lines)


def get_ray_doc_version() -> str:
    """Return the part of an address at docs.ray.io that stands for this version of Ray."""
    import ray

    return f"releases-{ray.__version__}" if re.fullmatch(r"\d+\.\d+\.\d+", ray.__version__) else "master"


def is_in_test() -> bool:
    """Return True in a test of pytest or Buildkite."""
    return any(name in os.environ for name in ("PYTEST_CURRENT_TEST", "BUILDKITE"))


def open_log(path: str, unbuffered: bool = False, **kwargs: Any) -> Any:
    """Open a file to append lines of text to, each of which is written at once.

    Args:
        path: the file.
        unbuffered: write parts of lines at once too.
        kwargs: further arguments of `open`, which come before these.
    """
    file = open(path, **{"buffering": 1, "mode": "a", "encoding": "utf-8", **kwargs})  # noqa: SIM115
    if unbuffered and isinstance(file, io.TextIOWrapper):
        file.reconfigure(write_through=True)
    return file


# ------------------------------------------------------------ usage lib
# `ray._common.usage.usage_lib`: what Ray reports of itself over the network. hpcray reports nothing.


class _TagKey:
    """Any attribute is a key; it is its own name."""

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name

    def Name(self, key: str) -> str:
        """Return the name of a key."""
        return key

    def Value(self, name: str) -> str:
        """Return the key of a name: the name itself."""
        return name


TagKey = _TagKey()


def usage_stats_enabled() -> bool:
    """Return False."""
    return False


def record_extra_usage_tag(key: Any, value: str, gcs_client: Any = None) -> None:
    """No effect."""


def record_library_usage(library_usage: str) -> None:
    """No effect."""


def record_hardware_usage(hardware_usage: str) -> None:
    """No effect."""


def get_hardware_usages_to_report(gcs_client: Any) -> list[str]:
    """Return an empty list."""
    return []


get_library_usages_to_report = get_hardware_usages_to_report


def get_extra_usage_tags_to_report(gcs_client: Any) -> dict[str, str]:
    """Return an empty dict."""
    return {}


# ------------------------------------------------------------ network utils
# `ray._common.network_utils`: addresses and ports. Also `ray._private.services`.


def build_address(host: str, port: int | str) -> str:
    """Join host and port to `host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if is_ipv6(host) else f"{host}:{port}"


def parse_address(address: str) -> tuple[str, str] | None:
    """Split an address into (host, port). Returns None for an address without a port."""
    if ":" not in address:
        return None
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], port
    return None if ":" in host and "://" not in host else (host, port)


def is_ipv6(host: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6, host)
    except OSError:
        return False
    return True


def is_localhost(host: str) -> bool:
    """Return True for a name or address of the loopback interface."""
    return host in ("localhost", "127.0.0.1", "::1")


def get_localhost_ip() -> str:
    return "127.0.0.1"


def get_all_interfaces_ip() -> str:
    """Return the address to bind to for all interfaces: that of IPv6 where this node's address is one of IPv6."""
    return "::" if is_ipv6(node_ip_address()) else "0.0.0.0"


def find_free_port(family: socket.AddressFamily = socket.AF_INET) -> int:
    """Return a TCP port that was free at the time of the call."""
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


get_node_ip_address = node_ip_address_from_perspective = node_ip_address


def get_address_and_port() -> tuple[str, int]:
    """Return the address of this node, and a TCP port that was free at the time of the call."""
    address = get_node_ip_address()
    return address, find_free_port(socket.AF_INET6 if is_ipv6(address) else socket.AF_INET)


def find_gcs_addresses() -> set[str]:
    """Return no address: no process of a job listens on a port."""
    return set()


class DeferSigint:
    """Context manager in whose block SIGINT waits: its handler is called at the end, once.

    The handler is the last one that the block has set for SIGINT with `signal.signal`, else the one of before.

    Raises:
        ValueError: not in the main thread, where alone Python calls handlers.
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("DeferSigint is for the main thread; hint: DeferSigint.create_if_main_thread()")
        self._came: tuple[int, FrameType | None] | None = None
        self._handler: Any = None
        self._set = signal.signal

    @classmethod
    def create_if_main_thread(cls) -> contextlib.AbstractContextManager[Any]:
        """Return a `DeferSigint` in the main thread, and a context manager without an effect in others."""
        return cls() if threading.current_thread() is threading.main_thread() else contextlib.nullcontext()

    def __enter__(self) -> DeferSigint:
        self._set, self._handler = signal.signal, signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, self._defer)
        signal.signal = self._note  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal = self._set
        signal.signal(signal.SIGINT, self._handler)
        if self._came is not None and callable(self._handler):
            self._handler(*self._came)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        self._came = number, frame

    def _note(self, number: int, handler: Any) -> Any:
        if number != signal.SIGINT:
            return self._set(number, handler)
        before, self._handler = self._handler, handler
        return before
