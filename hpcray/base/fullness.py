"""The error for a node store that has no room, by what its words say."""

from __future__ import annotations

import errno
import os

from hpcray.base.errors import ObjectStoreFullError, OutOfDiskError, RayError

_FULL_DISK = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))
FAILED = "Spilling to disk failed: "


def store_full(reason: str) -> RayError:
    """OutOfDiskError where the store could not spill because the disk is full too, else ObjectStoreFullError.

    Args:
        reason: as the store gives it.
    """
    _, _, why = reason.partition(FAILED)
    return OutOfDiskError(reason) if why.startswith(_FULL_DISK) else ObjectStoreFullError(reason)
