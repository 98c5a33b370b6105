"""Names of Ray that hpcray itself has no use for.

Here are those of `ray`, `ray._raylet`, `ray.job_config` and `ray.actor`, and those of Ray Client, Ray Data, Ray Train
and the job server, which packages import though hpcray has none of these: the latter answer that the part is not
connected, or raise an error that names the replacement.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from hpcray.api.actor import ActorClass
from hpcray.api.logging_config import LoggingConfig
from hpcray.api.placement_group import PlacementGroupID as _OwnPlacementGroupID
from hpcray.common.ids import ActorID as _OwnActorID
from hpcray.runtime.core_worker.generators import ObjectRefGenerator

if TYPE_CHECKING:
    from typing_extensions import Self

# -------------------------------------------------------------------- ray, ray._raylet, ray.job_config, ray.actor

SCRIPT_MODE, WORKER_MODE, LOCAL_MODE = 0, 1, 2

logger = logging.getLogger("ray")

StreamingObjectRefGenerator = ObjectRefGenerator

RAY_NODE_ID_KEY = "ray.io/node-id"
RAY_NODE_ACCELERATOR_TYPE_KEY = "ray.io/accelerator-type"
RAY_NODE_MARKET_TYPE_KEY = "ray.io/market-type"
RAY_NODE_REGION_KEY = "ray.io/availability-region"
RAY_NODE_ZONE_KEY = "ray.io/availability-zone"
RAY_NODE_GROUP_KEY = "ray.io/node-group"

_LIFETIMES = ("detached", "non_detached")


class Language(enum.Enum):
    """Languages of workers. Every worker of hpcray runs Python."""

    PYTHON = 0
    JAVA = 1
    CPP = 2


class BaseID(bytes):
    """Base class of ids: bytes with Ray's conversions."""

    __slots__ = ()
    SIZE = 28

    @classmethod
    def from_hex(cls, text: str) -> Self:
        return cls(bytes.fromhex(text))

    @classmethod
    def from_binary(cls, data: bytes) -> Self:
        return cls(data)

    @classmethod
    def from_random(cls) -> Self:
        return cls(os.urandom(cls.SIZE))

    @classmethod
    def nil(cls) -> Self:
        return cls(b"\xff" * cls.SIZE)

    @classmethod
    def size(cls) -> int:
        return cls.SIZE

    def binary(self) -> bytes:
        return bytes(self)

    def is_nil(self) -> bool:
        """Return True for the nil id and the empty id."""
        return not self or self == b"\xff" * len(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.hex()})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (bytes(self),)


class _OrOwn(type):
    """Metaclass: hpcray's own class of the same ids also passes `isinstance`."""

    own: type

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or isinstance(instance, cls.own)


class UniqueID(BaseID):
    """Any id of 28 bytes."""


class NodeID(UniqueID):
    """Id of a node."""


class WorkerID(UniqueID):
    """Id of a process."""


class ClusterID(UniqueID):
    """Id of a job's session."""


class FunctionID(UniqueID):
    """Id of a remote function."""


class ActorClassID(UniqueID):
    """Id of an actor class."""


class JobID(BaseID):
    """Id of a job."""

    SIZE = 4

    @classmethod
    def from_int(cls, number: int) -> Self:
        return cls(number.to_bytes(cls.SIZE, "little"))

    def int(self) -> int:
        return int.from_bytes(self, "little")


class TaskID(BaseID):
    """Id of a task, made as Ray makes it: 8 bytes of its own, then the id of its actor. hpcray's own are shorter."""

    SIZE = 24

    @classmethod
    def for_driver_task(cls, job_id: bytes) -> Self:
        """Return the id that stands for the driver of a job."""
        return cls(_NIL[: cls.SIZE - JobID.SIZE] + job_id)

    @classmethod
    def for_fake_task(cls, job_id: bytes) -> Self:
        """Return a random id of a task of a job."""
        return cls(os.urandom(_UNIQUE) + _NIL[: ActorID.SIZE - JobID.SIZE] + job_id)

    @classmethod
    def for_normal_task(cls, job_id: bytes, parent_task_id: bytes, parent_task_counter: int) -> Self:
        """Return the id of a task, by what submitted it."""
        own = _digest(job_id, parent_task_id, parent_task_counter)[:_UNIQUE]
        return cls(own + _NIL[: ActorID.SIZE - JobID.SIZE] + job_id)

    @classmethod
    def for_actor_creation_task(cls, actor_id: bytes) -> Self:
        """Return the id of the creation of an actor."""
        return cls(_NIL[:_UNIQUE] + actor_id)

    @classmethod
    def for_actor_task(cls, job_id: bytes, parent_task_id: bytes, parent_task_counter: int, actor_id: bytes) -> Self:
        """Return the id of a call, by what submitted it and the actor."""
        return cls(_digest(job_id, parent_task_id, parent_task_counter)[:_UNIQUE] + actor_id)

    def actor_id(self) -> ActorID:
        """Return the id of the actor; without one, nil but for the job."""
        return ActorID(self[_UNIQUE:])

    def job_id(self) -> JobID:
        """Return the id of the job."""
        return JobID(self[-JobID.SIZE :])


class ActorID(BaseID, metaclass=_OrOwn):
    """Id of an actor. `handle._actor_id` is one, though shorter than Ray's."""

    SIZE = 16
    own = _OwnActorID

    @classmethod
    def of(cls, job_id: bytes, parent_task_id: bytes, parent_task_counter: int) -> Self:
        """Return the id of an actor, by what created it."""
        return cls(_digest(job_id, parent_task_id, parent_task_counter)[: cls.SIZE - JobID.SIZE] + job_id)

    @property
    def job_id(self) -> JobID:
        """Id of the job."""
        return JobID(self[-JobID.SIZE :])


class PlacementGroupID(BaseID, metaclass=_OrOwn):
    """Id of a placement group. `group.id` is one, though shorter than Ray's."""

    SIZE = 18
    own = _OwnPlacementGroupID

    @classmethod
    def of(cls, job_id: bytes) -> Self:
        """Return a random id of a placement group of a job."""
        return cls(os.urandom(cls.SIZE - JobID.SIZE) + job_id)


_UNIQUE = 8  # bytes of a task's id before its actor's
_NIL = b"\xff" * BaseID.SIZE


def _digest(job_id: bytes, parent_task_id: bytes, counter: int) -> bytes:
    return hashlib.sha256(job_id + parent_task_id + counter.to_bytes(8, "little")).digest()


class JobConfig:
    """Settings of a job, for `init(job_config=...)`.

    Args:
        runtime_env, ray_namespace: as the arguments `runtime_env` and `namespace` of `init()`.
        metadata: stored without effect.
        jvm_options, code_search_path: accepted without effect.
        default_actor_lifetime: "detached" or "non_detached": `lifetime` of the actors that have none of their own.

    Raises:
        ValueError: the lifetime is unknown.
    """

    def __init__(
        self,
        jvm_options: list[str] | None = None,
        code_search_path: list[str] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        _client_job: bool = False,
        metadata: dict[str, str] | None = None,
        ray_namespace: str | None = None,
        default_actor_lifetime: str = "non_detached",
        _py_driver_sys_path: list[str] | None = None,
    ) -> None:
        self.jvm_options = jvm_options or []
        self.code_search_path = code_search_path or []
        self.metadata = metadata or {}
        self.ray_namespace = ray_namespace
        self.py_logging_config: LoggingConfig | None = None
        self.set_runtime_env(runtime_env)
        self.set_default_actor_lifetime(default_actor_lifetime)

    @classmethod
    def from_json(cls, job_config_json: Mapping[str, Any]) -> JobConfig:
        """Make a JobConfig from a mapping of its fields."""
        field = job_config_json.get
        return cls(
            field("jvm_options"), field("code_search_path"), field("runtime_env"), False, field("metadata"),
            field("ray_namespace"),
        )  # fmt: skip

    def set_metadata(self, key: str, value: str) -> None:
        self.metadata[key] = value

    def set_py_logging_config(self, logging_config: LoggingConfig | None = None) -> None:
        """Set the `LoggingConfig` of the job's workers, where `init` gets none."""
        self.py_logging_config = logging_config

    def set_ray_namespace(self, ray_namespace: str) -> None:
        self.ray_namespace = ray_namespace

    def set_runtime_env(self, runtime_env: Mapping[str, Any] | None, validate: bool = False) -> None:
        """Set the runtime_env; `init()` checks it."""
        self.runtime_env = dict(runtime_env or {})

    def set_default_actor_lifetime(self, default_actor_lifetime: str) -> None:
        """Set the default lifetime of actors, "detached" or "non_detached"."""
        if default_actor_lifetime not in _LIFETIMES:
            raise ValueError(
                f"Invalid default_actor_lifetime {default_actor_lifetime!r}: it must be one of {list(_LIFETIMES)}"
            )
        self._default_actor_lifetime = default_actor_lifetime


def _modify_class(cls: type) -> type:
    """Make a subclass of the same name, so that attributes set on it do not reach the user's class.

    Ray adds methods of its own to the subclass; hpcray adds none.

    Raises:
        TypeError: the argument is an actor class, or no class.
    """
    if isinstance(cls, ActorClass):
        raise TypeError("a plain class is required, not an actor class")
    if not isinstance(cls, type):
        raise TypeError(f"a class is required, not {type(cls).__name__}")
    if hasattr(cls, "__ray_actor_class__"):
        return cls
    body: dict[str, Any] = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "__qualname__": cls.__qualname__,
        "__ray_actor_class__": cls,
    }
    return type(cls)(cls.__name__, (cls,), body)


# -------------------------------------------------------------------- ray._private.client_mode_hook

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


# -------------------------------------------------------------------- ray.util.client, ray.util.client.common


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


# -------------------------------------------------------------------- ray.dashboard.utils, ray.job_submission


def get_address_for_submission_client(address: str | None = None) -> NoReturn:
    """Refused.

    Raises:
        ConnectionError: always: hpcray has no job server.
    """
    raise ConnectionError(
        f"there is no job server to send jobs to (address {address!r}): hpcray has no HTTP server; "
        "hint: hpcray.jobs.submit(...) or `hpcray submit`"
    )


class JobStatus(str, enum.Enum):
    """States of a job of Ray's job server."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    def __str__(self) -> str:
        return self.value

    def is_terminal(self) -> bool:
        """Return True for the states of a job that has ended."""
        return self in (JobStatus.STOPPED, JobStatus.SUCCEEDED, JobStatus.FAILED)


class JobSubmissionClient:
    """The client of Ray's HTTP job server, which hpcray lacks; hint: `hpcray.jobs.submit`."""

    def __init__(self, address: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Always raises ConnectionError."""
        get_address_for_submission_client(address)


# -------------------------------------------------------------------- ray.data, ray.train._internal.session


def from_pandas_refs(dfs: Any, *_: Any, **__: Any) -> NoReturn:
    """Refused.

    Raises:
        NotImplementedError: always: Ray Data is no part of hpcray.
    """
    raise NotImplementedError("hpcray does not have ray.data.from_pandas_refs: Ray Data is no part of hpcray")


def get_session() -> None:
    """Return None, as Ray does outside of Train workers."""
