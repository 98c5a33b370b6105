"""`ray.util.client`: the entry point of Ray Client, which is never connected, and the classes of its objects."""

from __future__ import annotations

from typing import Any, NoReturn


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
