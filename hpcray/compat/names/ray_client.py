"""Ray Client, which is never connected: its entry points (`ray.util.client`, `ray.util.connect`, `ray.client`) and the
classes of its objects."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from hpcray.api.session import AutoInit, init, is_initialized


class RayAPIStub:
    """Ray Client's entry point. It is never connected."""

    def is_connected(self) -> bool:
        return False

    def is_initialized(self) -> bool:
        return False

    def disconnect(self) -> None:
        """No effect."""

    def connect(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Always raises ConnectionError."""
        raise ConnectionError("there is no Ray Client server (ray://) in hpcray; hint: init(address='auto') on a node")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConnectionError(f"Ray Client is not connected, and hpcray has none: ray.util.client.ray.{name}")


ray = RayAPIStub()


def connect(conn_str: str, *args: Any, **kwargs: Any) -> NoReturn:
    """Always raises ConnectionError."""
    ray.connect(conn_str, *args, **kwargs)


def disconnect() -> None:
    """No effect: there is nothing to disconnect."""


class ClientBuilder:
    """`ray.client(address).namespace(...).env(...).connect()`: `init()` with the same address."""

    def __init__(self, address: str | None) -> None:
        self.address = address
        self._options: dict[str, Any] = {}

    def env(self, env: dict[str, Any]) -> ClientBuilder:
        """Set the runtime_env of the job."""
        self._options["runtime_env"] = env
        return self

    def namespace(self, namespace: str) -> ClientBuilder:
        """Set the namespace of the job."""
        self._options["namespace"] = namespace
        return self

    def connect(self) -> Any:
        """Call `init`. An address with `ray://` is refused by it."""
        return init(address=None if self.address in (None, "local") else self.address, **self._options)

    def disconnect(self) -> None:
        """No effect."""


def client(address: str | None = None, _deprecation_warn_enabled: bool = True) -> ClientBuilder:
    """Return a builder for a connection to a cluster; Ray's name for `init` before it took all addresses itself."""
    return ClientBuilder(address)


def num_connected_contexts() -> int:
    return 0


class ClientObjectRef:
    """A ref of Ray Client. For isinstance checks; no value is an instance."""


class ClientActorRef:
    """An actor ref of Ray Client."""


class ClientActorHandle:
    """An actor handle of Ray Client."""


class ClientActorClass:
    """An actor class of Ray Client."""


class ClientRemoteFunc:
    """A remote function of Ray Client."""


# ------------------------------------------------------------ client mode hook
# `ray._private.client_mode_hook`: no process is a Ray Client's.


F = TypeVar("F", bound=Callable[..., Any])

is_client_mode_enabled = False
is_client_mode_enabled_by_default = False


def _no_effect() -> None:
    """No effect."""


_enable_client_hook = _explicitly_enable_client_mode = _explicitly_disable_client_mode = _no_effect


def _disable_client_hook() -> bool:
    return False


@contextlib.contextmanager
def disable_client_hook() -> Iterator[None]:
    """No effect."""
    yield


enable_client_mode = disable_client_hook


def client_mode_hook(func: F) -> F:
    return func


def client_mode_should_convert() -> bool:
    return False


def client_mode_wrap(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function without changing its behavior."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    return wrapper


def _no_client(*_: Any, **__: Any) -> NoReturn:
    raise ConnectionError("there is no Ray Client in hpcray, and client_mode_should_convert() is False")


client_mode_convert_function = client_mode_convert_actor = _no_client


def java_function(class_name: str, function_name: str) -> NoReturn:
    """Refuse a function of Java.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(f"{class_name}.{function_name}: there are no workers in other languages")


def java_actor_class(class_name: str) -> NoReturn:
    """Refuse an actor class of Java.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(f"{class_name}: there are no workers in other languages")


# ------------------------------------------------------------ auto init hook
# `ray._private.auto_init_hook`: `init()` at the first use.


R = TypeVar("R")

auto_init_lock = threading.Lock()
enable_auto_connect = AutoInit.enabled


def auto_init_ray() -> None:
    """Call `init()` unless there is a session, or RAY_ENABLE_AUTO_CONNECT is 0."""
    if AutoInit.enabled and not is_initialized():
        with auto_init_lock:
            if not is_initialized():
                init()


def wrap_auto_init(fn: Callable[..., R]) -> Callable[..., R]:
    """Return the function with `auto_init_ray()` before it."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> R:
        auto_init_ray()
        return fn(*args, **kwargs)

    return wrapper
