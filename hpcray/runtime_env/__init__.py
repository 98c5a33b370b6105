"""`ray.runtime_env`: the environment of a job, task or actor."""

from hpcray.host.runtime_env import RuntimeEnv, RuntimeEnvConfig

__all__ = ["RuntimeEnv", "RuntimeEnvConfig"]
