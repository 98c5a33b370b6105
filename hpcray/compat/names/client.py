"""`ray.util.client`: Ray Client, of which only the answer "not connected" is here."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["RayAPIStub", "num_connected_contexts", "ray"]


class RayAPIStub:
    """The client's side of Ray Client, never connected."""

    def is_connected(self) -> bool:
        """False."""
        return False

    def is_initialized(self) -> bool:
        """False."""
        return False

    def disconnect(self) -> None:
        """Nothing to leave."""

    def connect(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ConnectionError."""
        raise ConnectionError("there is no Ray Client server (ray://) in hpcray; hint: init(address='auto') on a node")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConnectionError(f"Ray Client is not connected, and hpcray has none: ray.util.client.ray.{name}")


ray = RayAPIStub()


def num_connected_contexts() -> int:
    """0."""
    return 0
