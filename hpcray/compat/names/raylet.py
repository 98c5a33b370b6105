"""Constants and small functions of `ray._raylet` that Ray's libraries read."""

from __future__ import annotations

import enum
import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from hpcray.api.session import require_session
from hpcray.common.labels import conditions, holds
from hpcray.common.resources import IMPLICIT
from hpcray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from hpcray.runtime.core_worker.context import async_task
from hpcray.runtime.core_worker.generators import ObjectRefGenerator

GRPC_STATUS_CODE_RESOURCE_EXHAUSTED = 8
IMPLICIT_RESOURCE_PREFIX = IMPLICIT
RAY_INTERNAL_NAMESPACE_PREFIX = "_ray_internal_"
RAY_NODE_ACCELERATOR_TYPE_KEY = "ray.io/accelerator-type"
RAY_NODE_GROUP_KEY = "ray.io/node-group"
RAY_NODE_ID_KEY = "ray.io/node-id"
RAY_NODE_MARKET_TYPE_KEY = "ray.io/market-type"
RAY_NODE_REGION_KEY = "ray.io/availability-region"
RAY_NODE_TPU_POD_TYPE_KEY = "ray.io/tpu-pod-type"
RAY_NODE_TPU_SLICE_NAME_KEY = "ray.io/tpu-slice-name"
RAY_NODE_TPU_TOPOLOGY_KEY = "ray.io/tpu-topology"
RAY_NODE_TPU_WORKER_ID_KEY = "ray.io/tpu-worker-id"
RAY_NODE_ZONE_KEY = "ray.io/availability-zone"
RESOURCE_UNIT_SCALING = 10_000

StreamingObjectRefGenerator = ObjectRefGenerator


def node_labels_match_selector(node_labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Return True if a node with these labels meets a `label_selector`."""
    return all(holds(condition, node_labels) for condition in conditions(selector))


class MessagePackSerializer:
    """Values as MessagePack, which processes in other languages can read."""

    _PYTHON = 101
    """Ray's extension type for what only Python can read."""

    @classmethod
    def dumps(cls, obj: Any, python_serializer: Callable[[Any], Any] | None = None) -> bytes:
        """Return a value as bytes; `python_serializer` makes a number of what MessagePack does not have."""

        def extend(value: Any) -> msgspec.msgpack.Ext:
            if python_serializer is None:
                raise TypeError(f"{type(value)} is not a type of MessagePack")
            return msgspec.msgpack.Ext(cls._PYTHON, msgspec.msgpack.encode(python_serializer(value)))

        return msgspec.msgpack.encode(obj, enc_hook=extend)

    @classmethod
    def loads(cls, s: bytes, python_deserializer: Callable[[Any], Any] | None = None) -> Any:
        """Return the value of `dumps`; `python_deserializer` gets the numbers that its counterpart made."""

        def extended(code: int, data: memoryview) -> Any:
            if code == cls._PYTHON and python_deserializer is not None:
                return python_deserializer(msgspec.msgpack.decode(data))
            return msgspec.msgpack.Ext(code, bytes(data))

        return msgspec.msgpack.decode(s, ext_hook=extended)


# ------------------------------------------------------------ step functions of time, for Serve's autoscaler


def merge_instantaneous_total_cython(replicas_timeseries: Sequence[Sequence[Any]]) -> list[tuple[float, float]]:
    """Add step functions of time.

    Args:
        replicas_timeseries: of each replica its points (`timestamp` in seconds, `value`) by time. A value holds until
            the next point; before the first one it is 0.

    Returns:
        (time rounded to 10 ms, sum) for each time at which a value changed.
    """
    changes: dict[float, float] = {}
    for series in replicas_timeseries:
        last = 0.0
        for point in series:
            if point.value != last:
                time = int(point.timestamp * 100 + 0.5) / 100
                changes[time] = changes.get(time, 0.0) + point.value - last
                last = point.value
    merged, total = [], 0.0
    for time in sorted(changes):
        total += changes[time]
        merged.append((time, total))
    return merged


def time_weighted_average_cython(
    step_series: Sequence[Any], window_start: float, window_end: float, last_window_s: float
) -> float | None:
    """Average a step function over a span of time.

    Args:
        step_series: points (`timestamp` in seconds, `value`) by time.
        window_start: -inf for the first point.
        window_end: -inf for `last_window_s` seconds after the last point.

    Returns:
        The average; None where there are no points, or the span is empty.
    """
    if not step_series:
        return None
    unset = float("-inf")
    start = step_series[0].timestamp if window_start == unset else window_start
    end = step_series[-1].timestamp + last_window_s if window_end == unset else window_end
    if end <= start:
        return None
    area, value, since = 0.0, 0.0, start
    for point in step_series:
        if point.timestamp >= end:
            break
        if point.timestamp > since:
            area += value * (point.timestamp - since)
            since = point.timestamp
        value = point.value
    return float((area + value * (end - since)) / (end - start))


GRPC_STATUS_CODE_UNKNOWN, GRPC_STATUS_CODE_DEADLINE_EXCEEDED, GRPC_STATUS_CODE_RESOURCE_EXHAUSTED = 2, 4, 8
GRPC_STATUS_CODE_UNIMPLEMENTED, GRPC_STATUS_CODE_UNAVAILABLE = 12, 14

async_task_id = async_task
"""The call whose coroutine runs; a library sets it to None for calls that are not to be cancelled with it."""


# ------------------------------------------------------------ authentication
# `ray._raylet`: the token by which processes of one job know each other over gRPC.
#
# Replicas of Serve listen for calls of each other, and unpickle them. So a call without the job's token is refused;
# there is no RAY_AUTH_MODE=disabled. The token is random, and is kept in the job's key-value store, which no other user
# can read.


_KEY, _SPACE = "grpc-token", "hpcray-authentication"


def job_secret(key: str) -> str:
    """Return 256 random bits, as text, that all processes of the job read from its key-value store."""
    # Of several that ask first, one wins, and all read what it wrote.
    _internal_kv_put(key, secrets.token_hex(32), overwrite=False, namespace=_SPACE)
    return (_internal_kv_get(key, namespace=_SPACE) or b"").decode()


class AuthenticationMode(enum.IntEnum):
    """How calls are authenticated."""

    DISABLED = 0
    TOKEN = 1


class AuthenticationTokenLoader:
    """The token of the job that this process belongs to."""

    _instance: AuthenticationTokenLoader | None = None

    def __init__(self) -> None:
        self._of: object = None
        self._token = ""

    @classmethod
    def instance(cls) -> AuthenticationTokenLoader:
        """Return the loader of this process."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def has_token(self, ignore_auth_mode: bool = False) -> bool:
        """Every job has a token."""
        return True

    def get_raw_token(self, ignore_auth_mode: bool = False) -> str:
        """Return the token; the first process that asks makes it."""
        session = require_session()
        if self._of is not session:
            self._token = job_secret(_KEY)
            self._of = session
        return self._token

    def get_token_for_http_header(self) -> dict[str, str]:
        """Return the header of a call."""
        return {"authorization": f"Bearer {self.get_raw_token()}"}


def get_authentication_mode() -> AuthenticationMode:
    """Calls are always authenticated."""
    return AuthenticationMode.TOKEN


def validate_authentication_token(provided: str) -> bool:
    """True if the value of a header "authorization" holds the token of this job."""
    token = AuthenticationTokenLoader.instance().get_raw_token()
    return bool(token) and hmac.compare_digest(provided.encode(), f"Bearer {token}".encode())
