"""Ray Client, which is never connected: its entry points (`ray.util.client`, `ray.util.connect`, `ray.client`) and the
classes of its objects."""

from __future__ import annotations

from typing import Any, NoReturn

from hpcray.api.session import init


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


class ClientContext:
    """What connecting with Ray Client would return. For isinstance checks; no value is an instance."""


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
