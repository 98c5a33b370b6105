"""`ray.util.timer`: how long something takes, on average."""

from hpcray.compat.names.timer import _Timer

__all__ = ["_Timer"]
