"""`multiprocessing.Pool` over the nodes of the job."""

from multiprocessing import TimeoutError

from hpcray.util.multiprocessing.pool import Pool

__all__ = ["Pool", "TimeoutError"]
