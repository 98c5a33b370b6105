"""`ray.runtime_env`: the environment of a job, task or actor."""

from hpcray.runtime_env.runtime_env import RuntimeEnv, RuntimeEnvConfig

__all__ = ["RuntimeEnv", "RuntimeEnvConfig"]
