"""`ray.util.annotations`."""

from hpcray.compat.names.annotations import (
    AnnotationType,
    Deprecated,
    DeveloperAPI,
    PublicAPI,
    RayDeprecationWarning,
)

__all__ = ["AnnotationType", "Deprecated", "DeveloperAPI", "PublicAPI", "RayDeprecationWarning"]
