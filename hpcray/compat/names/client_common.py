"""`ray.util.client.common`: classes for isinstance checks. Nothing is an instance of them."""

from __future__ import annotations


class ClientObjectRef:
    """A ref of Ray Client."""


class ClientActorRef:
    """An actor ref of Ray Client."""


class ClientActorHandle:
    """An actor handle of Ray Client."""


class ClientActorClass:
    """An actor class of Ray Client."""


class ClientRemoteFunc:
    """A remote function of Ray Client."""
