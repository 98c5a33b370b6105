"""`ray.types`."""

from hpcray.runtime.refs import ObjectRef

__all__ = ["ObjectRef"]
