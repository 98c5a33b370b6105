"""`ray.job_config`: the settings of a job as one object."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from hpcray.api.driver_job import LoggingConfig

_LIFETIMES = ("detached", "non_detached")


class JobConfig:
    """Settings of a job, for `init(job_config=...)`.

    Args:
        runtime_env, ray_namespace: as the arguments `runtime_env` and `namespace` of `init()`.
        metadata: stored without effect.
        jvm_options, code_search_path: accepted without effect.
        default_actor_lifetime: "detached" or "non_detached": `lifetime` of the actors that have none of their own.

    Raises:
        ValueError: the lifetime is unknown. TypeError: code_search_path is neither a list nor a tuple.
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
        if not isinstance(self.code_search_path, (list, tuple)):
            raise TypeError(f"The type of code search path is incorrect: {type(code_search_path)}")
        self.metadata = metadata or {}
        self.ray_namespace = ray_namespace
        self.py_logging_config: LoggingConfig | None = None
        self.set_runtime_env(runtime_env)
        self.set_default_actor_lifetime(default_actor_lifetime)

    @classmethod
    def from_json(cls, job_config_json: Mapping[str, Any]) -> JobConfig:
        """Make a JobConfig from a mapping of its fields."""
        names = ("jvm_options", "code_search_path", "runtime_env", "metadata", "ray_namespace")
        fields: dict[str, Any] = {name: job_config_json.get(name) for name in names}
        return cls(**fields)

    def set_metadata(self, key: str, value: str) -> None:
        self.metadata[key] = value

    def set_py_logging_config(self, logging_config: LoggingConfig | None = None) -> None:
        """Set the `LoggingConfig` of the job's workers, where `init` gets none."""
        self.py_logging_config = logging_config

    def _get_proto_job_config(self) -> Any:
        """Return the settings under the names of Ray's message, of which nothing here is made."""
        logging_config = None if self.py_logging_config is None else pickle.dumps(self.py_logging_config)
        return SimpleNamespace(
            ray_namespace=self.ray_namespace or "",
            jvm_options=self.jvm_options,
            code_search_path=self.code_search_path,
            metadata=dict(self.metadata),
            default_actor_lifetime=_LIFETIMES.index(self._default_actor_lifetime),
            serialized_py_logging_config=logging_config or b"",
        )

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
