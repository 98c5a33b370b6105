"""Names of `ray.util` and its modules, and of Ray's libraries, that hpcray itself has no use for."""

from __future__ import annotations

import contextlib
import gc
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from hpcray.api.placement_group import bundle_selectors, check_request, checked_bundles
from hpcray.compat.names import rpdb as pdb
from hpcray.compat.names.utils import PLACEMENT_GROUP_BUNDLE_RESOURCE_NAME
from hpcray.util.state import list_tasks

__all__ = ["get_node_instance_id", "pdb"]


def get_node_instance_id() -> str:
    """Return "": the id of this node at a cloud provider."""
    return ""


# ------------------------------------------------------------ placement group
# `ray.util.placement_group`: checks that Ray's libraries make before they create a group.


def validate_placement_group(
    bundles: list[dict[str, float]],
    strategy: str | None = None,
    lifetime: str | None = None,
    _soft_target_node_id: str | None = None,
    bundle_label_selector: list[dict[str, str]] | None = None,
    topology_strategy: dict[str, str] | None = None,
) -> None:
    """Raise ValueError if `placement_group()` would."""
    check_request(bundles, strategy, lifetime, _soft_target_node_id, bundle_label_selector, topology_strategy)


def _validate_bundles(bundles: list[dict[str, float]]) -> None:
    """Raise ValueError for what is no list of bundles."""
    checked_bundles(bundles)


def _validate_bundle_label_selector(bundle_label_selector: list[dict[str, str]]) -> None:
    """Raise ValueError for what is no list of label selectors."""
    bundle_selectors(bundle_label_selector, None)


def _valid_resource_shape(resources: Mapping[str, float], bundle_specs: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a bundle has all these resources."""
    wanted = {name: amount for name, amount in resources.items() if name != PLACEMENT_GROUP_BUNDLE_RESOURCE_NAME}
    return any(all(bundle.get(name, 0) >= amount for name, amount in wanted.items()) for bundle in bundle_specs)


# ------------------------------------------------------------ state util
# `ray.util.state.util`: values of the command line.


def convert_string_to_type(val: Any, convert_type: type) -> Any:
    """Convert text to int, float or bool; None, and what has the type, stay. Raises ValueError for other texts."""
    if val is None or type(val) is convert_type:
        return val
    texts = {"False": False, "false": False, "0": False, "True": True, "true": True, "1": True}
    with contextlib.suppress(ValueError, KeyError):
        return texts[val] if convert_type is bool else convert_type(val)
    raise ValueError(f"Failed to convert a value {val} of type {type(val)} to {convert_type}")


# ------------------------------------------------------------ memory leaks
# `ray.util.debug`: the search for code that keeps more memory at each call. RLlib's algorithms call it on request.


_FRAMES = 20
_LARGEST = 100  # places of allocation that are followed
_SHOWN = 10
_INCREASE = 1000  # bytes; less is no leak
_GROWTH = ((60.0, 0.875), (20.0, 0.9), (10.0, 0.95))  # bytes for each call, correlation: the steeper, the less steady


class Suspect(NamedTuple):
    """A place that allocates more and more.

    Attributes:
        traceback: the place, as its last frames.
        memory_increase: bytes that came from the first call to the last one.
        slope: bytes for each call, by linear regression.
        rvalue: correlation of the number of calls with the bytes.
        hist: bytes after each call.
    """

    traceback: tracemalloc.Traceback
    memory_increase: float
    slope: float
    rvalue: float
    hist: list[int]


def _test_some_code_for_memory_leaks(
    desc: str,
    init: Callable[[], None] | None,
    code: Callable[[], None],
    repeats: int,
    max_num_trials: int = 1,
    min_memory_increase: int = 0,
) -> list[Suspect]:
    """Call a function many times, and find the places whose memory grows with the number of calls.

    Args:
        desc: what the function does, for the output.
        init: called before each trial.
        code: the function.
        repeats: number of calls in the first trial; the k-th trial has k times as many.
        max_num_trials: a trial follows on one that found something, and looks at what that found only.
        min_memory_increase: smaller increases, in bytes, are no leaks.

    Returns:
        What the last trial found, the largest increase first; empty for no leak.
    """
    suspects: list[Suspect] = []
    for trial in range(1, max_num_trials + 1):
        print(f"{desc}: {repeats * trial} calls")
        sizes = _sizes(init, code, repeats * trial, {suspect.traceback for suspect in suspects})
        found = [suspect for place, hist in sizes.items() if (suspect := _judge(place, hist)) is not None]
        suspects = sorted(
            (suspect for suspect in found if suspect.memory_increase >= min_memory_increase),
            key=lambda suspect: -suspect.memory_increase,
        )
        for suspect in suspects[:_SHOWN]:
            print(f"  {suspect.traceback[-1]}: {suspect.memory_increase} bytes more, {suspect.slope:.1f} for each call")
        if not suspects:
            break
    return suspects


def _sizes(
    init: Callable[[], None] | None, code: Callable[[], None], repeats: int, only: set[tracemalloc.Traceback]
) -> dict[tracemalloc.Traceback, list[int]]:
    """Return the bytes that are allocated after each call, by place."""
    sizes: dict[tracemalloc.Traceback, list[int]] = defaultdict(list)
    tracemalloc.start(_FRAMES)
    try:
        if init is not None:
            init()
        for _ in range(repeats):
            gc.collect()
            code()
            gc.collect()
            snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, tracemalloc.__file__)])
            for place in snapshot.statistics("traceback")[:_LARGEST]:
                if not only or place.traceback in only:
                    sizes[place.traceback].append(place.size)
    finally:
        tracemalloc.stop()
    return sizes


def _judge(place: tracemalloc.Traceback, hist: list[int]) -> Suspect | None:
    """Return a suspect where the growth is steep, or steady; None where there is none, or it is this module's own."""
    increase = hist[-1] - hist[0]
    if increase <= _INCREASE or place[-1].filename == __file__:
        return None
    calls = np.arange(len(hist))
    slope = float(np.polyfit(calls, hist, 1)[0])
    correlation = float(np.corrcoef(calls, hist)[0, 1])
    if any(slope > steepness and correlation > steadiness for steepness, steadiness in _GROWTH):
        return Suspect(place, increase, slope, correlation, hist)
    return None


# ------------------------------------------------------------ absent libraries
# Names of Ray Data and Ray Train that packages import where no wheel of Ray lends these libraries.


def from_pandas_refs(dfs: Any, *_: Any, **__: Any) -> NoReturn:
    """Refused.

    Raises:
        NotImplementedError: always: Ray Data is no part of hpcray.
    """
    raise NotImplementedError("hpcray does not have ray.data.from_pandas_refs: Ray Data is no part of hpcray")


def get_session() -> None:
    """Return None, as Ray does outside of Train workers."""


# ------------------------------------------------------------ state checks
# `ray._private.state_api_test_utils`: checks of the state API, for tests of programs.


_CHECK_TIMEOUT, _SAMPLES, _CHECK_PERIOD = 30.0, 10, 0.1  # seconds, calls, seconds


def invoke_state_api(
    verify_cb: Callable[[Any], bool],
    state_api_fn: Callable[..., Any],
    state_stats: Any = None,
    key_suffix: str | None = None,
    print_result: bool | None = False,
    err_msg: str | None = None,
    **kwargs: Any,
) -> Any:
    """Call a function of the state API once and check what it returns.

    Args:
        verify_cb: gets the result, and returns True if it is right.
        state_api_fn, kwargs: the function and its arguments.
        state_stats, key_suffix: without effect.
        print_result: print the result.
        err_msg: a part of the error's text.

    Returns:
        The result.

    Raises:
        AssertionError: the result is wrong, or the function has raised an exception.
    """
    try:
        result = state_api_fn(**{"timeout": 600, **kwargs, "raise_on_missing_output": False})
    except Exception as error:
        raise AssertionError(f"{state_api_fn.__name__}({kwargs}) failed: {error!r}") from error
    if print_result:
        print(result)
    if not verify_cb(result):
        raise AssertionError(f"{state_api_fn.__name__}({kwargs}): {len(result)} rows: {err_msg}")
    return result


def invoke_state_api_n(*args: Any, **kwargs: Any) -> None:
    """Call `invoke_state_api` until it succeeds ten times in a row.

    Raises:
        AssertionError: it did not within 30 s.
    """
    _await(lambda: [invoke_state_api(*args, **kwargs) for _ in range(_SAMPLES)], _CHECK_TIMEOUT)


def verify_failed_task(name: str, error_type: str, error_message: str | list[str] | None = None) -> bool:
    """Check that the only task of a name has failed with a type of error, and with some texts in its message.

    Raises:
        AssertionError: that is not so.
    """
    (task,) = _tasks(name, 1)
    found = (task["state"], task["error_type"])
    if found != ("FAILED", error_type):
        raise AssertionError(f"{name} is {found}")
    for text in [error_message] if isinstance(error_message, str) else error_message or ():
        if text not in (task.get("error_message") or ""):
            raise AssertionError(f"{text!r} is not in {task.get('error_message')!r}")
    return True


def wait_for_task_states(name_to_state: Mapping[str, str], timeout: float = 30) -> None:
    """Wait until each of these names is one of exactly one task in this state.

    Raises:
        AssertionError: that was not so within `timeout` seconds.
    """
    _await(lambda: [_tasks(name, 1, ("state", "=", state)) for name, state in name_to_state.items()], timeout)


def _tasks(name: str, number: int, *filters: tuple[str, str, str]) -> list[Any]:
    tasks = list_tasks(filters=[("name", "=", name), *filters], detail=True)
    if len(tasks) != number:
        raise AssertionError(f"{len(tasks)} tasks {name} {filters}, and not {number}")
    return tasks


def _await(check: Callable[[], object], timeout: float) -> None:
    """Repeat a check until it raises no AssertionError."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            check()
            return
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_CHECK_PERIOD)
