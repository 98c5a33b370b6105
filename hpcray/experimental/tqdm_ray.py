"""`ray.experimental.tqdm_ray`: a progress bar for workers."""

from hpcray.compat.names.tqdm_ray import safe_print, tqdm

__all__ = ["safe_print", "tqdm"]
