"""`ray.train._internal.session`: asked by packages that may run inside of a Ray Train worker. Here nothing does."""

from __future__ import annotations

__all__ = ["get_session"]


def get_session() -> None:
    """The session of the Train worker that this process is: None, as everywhere outside of Ray Train."""
