"""`ray._common.retry`: calls repeated after exceptions."""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import re
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

logger = logging.getLogger("ray")

R = TypeVar("R")


def format_exception(exc: BaseException, include_cause: bool = False) -> str:
    """Return "class: message"; `include_cause`: and that of the cause, where there is one."""
    shown = [exc, exc.__cause__] if include_cause and exc.__cause__ else [exc]
    return " ".join("".join(traceback.format_exception_only(type(one), one)).rstrip("\n") for one in shown)


def matches_error(pattern: str, error_str: str) -> bool:
    """Return True if the text contains the pattern, or matches it as a regular expression."""
    if pattern in error_str:
        return True
    with contextlib.suppress(re.error):
        return bool(re.search(pattern, error_str))
    return False


def call_with_retry(
    f: Callable[..., R],
    description: str,
    match: Sequence[str] | None = None,
    max_attempts: int = 10,
    max_backoff_s: int = 32,
    *args: Any,
    **kwargs: Any,
) -> R:
    """Call a function, again after an exception, with growing pauses.

    Args:
        f: the function. args, kwargs: its arguments.
        description: what it does, for the log ("open the file").
        match: texts or regular expressions, one of which the exception has to match; None: any exception.
        max_attempts: number of calls, at most.
        max_backoff_s: longest pause, in seconds.
    """
    assert max_attempts >= 1, f"`max_attempts` must be positive. Got {max_attempts}."
    for attempt in range(1, max_attempts + 1):
        try:
            return f(*args, **kwargs)
        except Exception as error:
            text = format_exception(error)
            if attempt == max_attempts or not (match is None or any(matches_error(one, text) for one in match)):
                logger.debug("Failed to %s after %d attempts: %s", description, attempt, text)
                raise error from None
            pause = min(2 ** (attempt - 1), max_backoff_s) * random.uniform(0.8, 1.2)
            logger.debug("Attempt %d to %s failed; the next one is in %.1f seconds", attempt, description, pause)
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def retry(
    description: str, match: Sequence[str] | None = None, max_attempts: int = 10, max_backoff_s: int = 32
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Make a decorator of `call_with_retry`."""

    def decorate(func: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(func)
        def inner(*args: Any, **kwargs: Any) -> R:
            return call_with_retry(func, description, match, max_attempts, max_backoff_s, *args, **kwargs)

        return inner

    return decorate
