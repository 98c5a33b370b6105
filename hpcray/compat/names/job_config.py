"""`ray.job_config`: what `init(job_config=...)` reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["JobConfig"]

_LIFETIMES = ("detached", "non_detached")


class JobConfig:
    """Settings of a job, for `init(job_config=...)`.

    Args:
        runtime_env, ray_namespace: as the arguments `runtime_env` and `namespace` of `init()`.
        metadata: kept, for nobody.
        jvm_options, code_search_path, default_actor_lifetime: accepted; other than the defaults has no effect, which
            `default_actor_lifetime="detached"` refuses.

    Raises:
        ValueError: the lifetime is unknown. NotImplementedError: it is "detached".
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
        self.set_runtime_env(runtime_env)
        self.set_default_actor_lifetime(default_actor_lifetime)

    @classmethod
    def from_json(cls, job_config_json: Mapping[str, Any]) -> JobConfig:
        """From the fields by name, as submitters of jobs have them."""
        said = job_config_json.get
        return cls(
            said("jvm_options"), said("code_search_path"), said("runtime_env"), False, said("metadata"),
            said("ray_namespace"),
        )  # fmt: skip

    def set_metadata(self, key: str, value: str) -> None:
        """Add an entry to `metadata`."""
        self.metadata[key] = value

    def set_ray_namespace(self, ray_namespace: str) -> None:
        """Set the namespace."""
        self.ray_namespace = ray_namespace

    def set_runtime_env(self, runtime_env: Mapping[str, Any] | None, validate: bool = False) -> None:
        """Set the runtime_env; `init()` checks it."""
        self.runtime_env = dict(runtime_env or {})

    def set_default_actor_lifetime(self, default_actor_lifetime: str) -> None:
        """Set the lifetime of actors; there is one."""
        if default_actor_lifetime not in _LIFETIMES:
            raise ValueError(
                f"Invalid default_actor_lifetime {default_actor_lifetime!r}: it must be one of {list(_LIFETIMES)}"
            )
        if default_actor_lifetime == "detached":
            raise NotImplementedError(
                'JobConfig(default_actor_lifetime="detached") is not supported; hint: .options(lifetime="detached")'
            )
