"""`ray._private.client_mode_hook`: there is no client mode, so that the hooks are the functions themselves."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

is_client_mode_enabled = False
is_client_mode_enabled_by_default = False


def _enable_client_hook() -> None:
    """Nothing to enable."""


def _disable_client_hook() -> bool:
    return False


def _explicitly_enable_client_mode() -> None:
    """Nothing to enable."""


def _explicitly_disable_client_mode() -> None:
    """Nothing to disable."""


@contextlib.contextmanager
def disable_client_hook() -> Iterator[None]:
    """For Ray's own server of clients: no effect."""
    yield


@contextlib.contextmanager
def enable_client_mode() -> Iterator[None]:
    """No effect."""
    yield


def client_mode_hook(func: F) -> F:
    """The function itself."""
    return func


def client_mode_should_convert() -> bool:
    """False."""
    return False


def client_mode_wrap(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, wrapped."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    return wrapper


def _no_client(*_: Any, **__: Any) -> NoReturn:
    raise ConnectionError("there is no Ray Client in hpcray, and client_mode_should_convert() is False")


client_mode_convert_function = client_mode_convert_actor = _no_client
