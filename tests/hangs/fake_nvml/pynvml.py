"""NVIDIA's library as `GpuSampler` calls it, for the program gpu.py: one GPU that is always in use."""

from types import SimpleNamespace


class NVMLError(Exception):
    pass


def nvmlInit():
    pass


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return 1


def nvmlDeviceGetHandleByIndex(place):
    return place


def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(used=1, total=2)


def nvmlDeviceGetName(handle):
    return "made up"


def nvmlDeviceGetUUID(handle):
    return "GPU-0"


def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=60)
