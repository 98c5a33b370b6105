"""Which devices the caller may use."""

from __future__ import annotations

from hpcray.api.session import ensure
from hpcray.host.accelerators import assigned_gpus, numbered


def get_gpu_ids() -> list[int] | list[str]:
    """Ids of the GPUs that the task or actor that asks holds; [] without any, and in a driver.

    They are numbers, counted from 0 on each node, unless the node's visibility variable (`CUDA_VISIBLE_DEVICES`, on AMD
    `ROCR_VISIBLE_DEVICES` or `HIP_VISIBLE_DEVICES`) was set before it started: then they are the words in it.
    """
    ensure()
    ids = assigned_gpus()
    return [int(name) for name in ids] if numbered() else ids
