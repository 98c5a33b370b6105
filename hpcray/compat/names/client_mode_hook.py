"""`ray._private.client_mode_hook`: no process is a Ray Client's."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

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
