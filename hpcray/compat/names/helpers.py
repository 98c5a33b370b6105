"""Helpers of `ray._private` and `ray._common` that other packages call, one section for each module."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import os
import random
import re
import threading
import time
import traceback
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn, TypeVar

from hpcray.api.session import init, is_initialized

logger = logging.getLogger("ray")

R = TypeVar("R")

# -------------------------------------------------------------------- ray._private.path_utils, collections_utils


def is_path(path_or_uri: str) -> bool:
    """Return False for a URI; a Windows path with a drive is a path on Windows.

    Raises:
        TypeError: the argument is no text.
    """
    if not isinstance(path_or_uri, str):
        raise TypeError(f" path_or_uri must be a string, got {type(path_or_uri)}.")
    scheme = urllib.parse.urlparse(path_or_uri).scheme
    path: Any = Path(path_or_uri)
    if isinstance(path, PurePosixPath):
        return not scheme
    assert isinstance(path, PureWindowsPath)
    return scheme == path.drive.strip(":").lower()


def split(items: Sequence[Any], chunk_size: int) -> Iterator[Any]:
    """Yield slices of `chunk_size` items; the last one may be shorter."""
    assert chunk_size > 0, "Chunk size has to be > 0"
    for start in range(0, len(items), chunk_size):
        yield items[start : start + chunk_size]


# -------------------------------------------------------------------- ray._private.auto_init_hook

auto_init_lock = threading.Lock()
enable_auto_connect = os.environ.get("RAY_ENABLE_AUTO_CONNECT", "") != "0"


def auto_init_ray() -> None:
    """Call `init()` unless there is a session, or RAY_ENABLE_AUTO_CONNECT is 0."""
    if enable_auto_connect and not is_initialized():
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


# -------------------------------------------------------------------- ray._private.inspect_util


def is_cython(obj: Any) -> bool:
    """Return True for a function or method that Cython compiled."""
    return any(type(one).__name__ == "cython_function_or_method" for one in (obj, getattr(obj, "__func__", None)))


def is_function_or_method(obj: Any) -> bool:
    """Return True for a function or method, one of Cython too."""
    return inspect.isfunction(obj) or inspect.ismethod(obj) or is_cython(obj)


def is_class_method(f: Any) -> bool:
    """Return True for a bound method."""
    return getattr(f, "__self__", None) is not None


def is_static_method(cls: type, f_name: str) -> bool:
    """Return True if the class has a static method of this name."""
    return isinstance(inspect.getattr_static(cls, f_name, None), staticmethod)


# -------------------------------------------------------------------- ray._common.retry


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


# -------------------------------------------------------------------- ray._private.dict


def merge_dicts(d1: dict[str, Any], d2: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `d1` with the values of `d2`; dicts in it are merged."""
    return deep_update(copy.deepcopy(d1), d2, True, [])


def deep_update(
    original: dict[str, Any],
    new_dict: Mapping[str, Any],
    new_keys_allowed: bool = False,
    allow_new_subkey_list: Sequence[str] | None = None,
    override_all_if_type_changes: Sequence[str] | None = None,
    override_all_key_list: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Set values of `original`, in place, to those of `new_dict`; dicts in it are updated in the same way.

    Args:
        original: the dict, which is returned.
        new_dict: the new values.
        new_keys_allowed: new keys may come in.
        allow_new_subkey_list: keys of dicts into which new keys may come in any case.
        override_all_if_type_changes: keys of dicts that are replaced where their "type" differs.
        override_all_key_list: keys of dicts that are replaced.

    Raises:
        Exception: a key is new that may not be.
    """
    for key, value in new_dict.items():
        if key not in original and not new_keys_allowed:
            raise Exception(f"Unknown config parameter `{key}` ")
        old = original.get(key)
        replaced = key in (override_all_key_list or ()) or not (isinstance(old, dict) and isinstance(value, dict))
        if not replaced and key in (override_all_if_type_changes or ()):
            replaced = "type" in value and "type" in old and value["type"] != old["type"]  # type: ignore[operator,index]
        if replaced:
            original[key] = value
        else:
            allowed = new_keys_allowed or key in (allow_new_subkey_list or ())
            deep_update(old, value, allowed, override_all_key_list=override_all_key_list)  # type: ignore[arg-type]
    return original


def flatten_dict(
    dt: dict[str, Any], delimiter: str = "/", prevent_delimiter: bool = False, flatten_list: bool = False
) -> dict[str, Any]:
    """Return a dict of the same type whose keys are the paths to the values of nested dicts.

    Args:
        dt: the dict, which is not changed.
        delimiter: separator of the parts of a path.
        prevent_delimiter: raise ValueError where a key has it.
        flatten_list: resolve lists too, by index. Empty dicts and lists vanish.
    """
    nested = (dict, list) if flatten_list else (dict,)
    flat = copy.copy(dt)
    if prevent_delimiter and any(delimiter in key for key in flat):
        _refuse_delimiter(delimiter)
    while any(isinstance(value, nested) for value in flat.values()):
        for key in [key for key, value in flat.items() if isinstance(value, nested)]:
            value = flat.pop(key)
            for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
                if prevent_delimiter and delimiter in str(name):
                    _refuse_delimiter(delimiter)
                flat[f"{key}{delimiter}{name}"] = inner
    return flat


def _refuse_delimiter(delimiter: str) -> NoReturn:
    raise ValueError(
        f"Found delimiter `{delimiter}` in key when trying to flatten array. Please avoid using the delimiter in your "
        "specification."
    )


def unflatten_dict(dt: dict[str, Any], delimiter: str = "/") -> dict[str, Any]:
    """Return the dict of dicts that `flatten_dict` flattened. Raises TypeError where a key is a value and a dict."""
    kind = type(dt)
    found = kind()
    for path, value in dt.items():
        *parents, last = path.split(delimiter)
        inner = found
        for name in parents:
            inner = inner.setdefault(name, kind())
            if not isinstance(inner, kind):
                raise TypeError(
                    f"Cannot unflatten dict due the key '{path}' having a parent key '{name}', which value is not of "
                    f"type {kind} (got {type(inner)}). Change the key names to resolve the conflict."
                )
        inner[last] = value
    return found


def unflattened_lookup(flat_key: str, lookup: Any, delimiter: str = "/", **kwargs: Any) -> Any:
    """Return `lookup["a"][0]["b"]` for "a/0/b".

    Args:
        flat_key: the path. lookup: dicts and lists. delimiter: separator of the path's parts.
        kwargs: `default`, which is returned instead of a KeyError.
    """
    if flat_key in lookup:
        return lookup[flat_key]
    found = lookup
    for name in flat_key.split(delimiter):
        try:
            if isinstance(found, Mapping):
                found = found[name]
            elif isinstance(found, Sequence):
                found = found[int(name)]
            else:
                raise KeyError
        except KeyError:
            if "default" in kwargs:
                return kwargs["default"]
            raise
    return found


# -------------------------------------------------------------------- ray.util.state.util


def convert_string_to_type(val: Any, convert_type: type) -> Any:
    """Convert text to int, float or bool; None, and what has the type, stay. Raises ValueError for other texts."""
    if val is None or type(val) is convert_type:
        return val
    texts = {"False": False, "false": False, "0": False, "True": True, "true": True, "1": True}
    with contextlib.suppress(ValueError, KeyError):
        return texts[val] if convert_type is bool else convert_type(val)
    raise ValueError(f"Failed to convert a value {val} of type {type(val)} to {convert_type}")
