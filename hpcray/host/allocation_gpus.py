"""Which GPUs this process may use, and how a worker is confined to some of them.

Ids are opaque: an index ("0"), a UUID ("GPU-8c5…") or a part of a GPU ("MIG-…"), as the vendor's variable takes them.
Inside an allocation only the environment counts: what else the machine has belongs to other jobs.

Source: CUDA programming guide, "CUDA environment variables"; ROCm, "GPU isolation techniques"; Slurm, gres.html.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

CUDA = "CUDA_VISIBLE_DEVICES"
ROCR = "ROCR_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"

_NVIDIA = Path("/proc/driver/nvidia")
_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_DEVICES = Path("/dev")
_SLURM_LISTS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
_VALID = re.compile(r"\d+|(?:GPU|MIG)-[0-9A-Za-z/-]+")
_UUID_BYTES = 96


def accelerators(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Ids of the GPUs that this node may use, in the order of the vendor's variable.

    Inside a Slurm allocation the machine is never asked; outside, it is asked only where no variable limits us.
    """
    environ = os.environ if environ is None else environ
    if is_amd(environ):
        return _amd(environ)
    if CUDA in environ:
        return _listed(environ[CUDA])
    if "SLURM_JOB_ID" in environ:
        return _of_slurm(environ)
    return _nvidia_of_machine()


def worker_variables(ids: Sequence[str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that confine a worker to some of this node's GPUs; set all of them, before it loads a GPU library.

    Args:
        ids: some of `accelerators()`; empty: no GPU.
        environ: the raylet's environment.
    """
    environ = os.environ if environ is None else environ
    wanted = ",".join(ids)
    if not is_amd(environ):
        return {CUDA: wanted}
    if ROCR not in environ:
        # HIP reads CUDA's variable too, when its own is not there, and both together confuse it.
        return {HIP: wanted, CUDA: wanted} if CUDA in environ else {HIP: wanted}
    # The lower layer hides the others and counts anew: for the upper layer the first one left is 0.
    counted = ",".join(str(index) for index in range(len(ids)))
    return {ROCR: wanted, **{name: counted for name in (HIP, CUDA) if name in environ}}


def visibility_variable(environ: Mapping[str, str] | None = None) -> str:
    """The variable whose ids `accelerators` gives: CUDA's, or ROCR's or HIP's on AMD."""
    return next(iter(worker_variables((), environ)))


def is_amd(environ: Mapping[str, str]) -> bool:
    """Slurm may set the variables of every vendor: the driver that is loaded decides."""
    if _NVIDIA.is_dir():
        return False
    if _KFD_NODES.is_dir() and any(_kfd_gpus()):
        return True
    return CUDA not in environ and (ROCR in environ or HIP in environ)


def _amd(environ: Mapping[str, str]) -> tuple[str, ...]:
    """ROCR's list is the node's; HIP's counts within it."""
    upper = environ.get(HIP, environ.get(CUDA))
    if ROCR not in environ:
        if upper is not None:
            return _listed(upper)
        return _of_slurm(environ) if "SLURM_JOB_ID" in environ else _amd_of_machine()
    lower = _listed(environ[ROCR])
    if upper is None or upper == environ[ROCR]:
        return lower  # Slurm without AutoDetect writes the same list into each
    return tuple(lower[int(index)] for index in _listed(upper) if index.isdecimal() and int(index) < len(lower))


def _listed(text: str) -> tuple[str, ...]:
    """The ids of a list; as in CUDA, the first that is none ends it (`-1`, `NoDevFiles`)."""
    found: list[str] = []
    for word in text.split(","):
        name = word.strip()
        if not _VALID.fullmatch(name) or name in found:
            break
        found.append(name)
    return tuple(found)


def _of_slurm(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Slurm's list, where a site does not set the vendor's variable; () where it names none."""
    for variable in _SLURM_LISTS:
        if environ.get(variable):
            ids = _listed(_indices(environ[variable]))
            # Where the other devices are locked away, the libraries count those that are left from 0.
            return tuple(str(index) for index in range(len(ids))) if _locked_away(ids) else ids
    return ()


def _indices(text: str) -> str:
    """`0-2,5` and `gpu:0,1` as `0,1,2,5` and `0,1`."""
    found: list[str] = []
    for part in text.removeprefix("gpu:").split(","):
        first, dash, last = part.partition("-")
        span = dash and first.isdecimal() and last.isdecimal()
        found += [str(index) for index in range(int(first), int(last) + 1)] if span else [part]
    return ",".join(found)


def _locked_away(ids: Sequence[str]) -> bool:
    """Whether a GPU of this machine that is not ours cannot be opened: the cgroup holds it back."""
    for device in _DEVICES.glob("nvidia[0-9]*"):
        if device.name.removeprefix("nvidia") not in ids:
            try:
                os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
            except OSError as error:
                return error.errno == errno.EPERM
            return False
    return False


# ---------------------------------------------------------------- the bare machine


def _nvidia_of_machine() -> tuple[str, ...]:
    """Indices of the machine's GPUs; where one is divided, the UUIDs of whole GPUs and of the parts."""
    if any(_NVIDIA.glob("capabilities/gpu*/mig/gi*")) and (ids := _ask_nvml()):
        return ids
    try:
        count = len(os.listdir(_NVIDIA / "gpus"))
    except OSError:
        return ()
    return tuple(str(index) for index in range(count))


def _ask_nvml() -> tuple[str, ...]:
    """UUIDs of parts of GPUs, and of GPUs that are not divided; () without NVML."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return ()
    except (OSError, AttributeError):
        return ()
    try:
        return tuple(_uuids(nvml))
    except AttributeError:  # a driver that is too old to know parts
        return ()
    finally:
        nvml.nvmlShutdown()


def _uuids(nvml: ctypes.CDLL) -> list[str]:
    found: list[str] = []
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        device = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
            continue
        parts = ctypes.c_uint()
        nvml.nvmlDeviceGetMaxMigDeviceCount(device, ctypes.byref(parts))
        below = []
        for number in range(parts.value):
            part = ctypes.c_void_p()
            if nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, number, ctypes.byref(part)) == 0:
                below.append(_uuid(nvml, part))
        found += below or [_uuid(nvml, device)]
    return [name for name in found if name]


def _uuid(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> str:
    text = ctypes.create_string_buffer(_UUID_BYTES)
    return text.value.decode() if nvml.nvmlDeviceGetUUID(device, text, _UUID_BYTES) == 0 else ""


def _amd_of_machine() -> tuple[str, ...]:
    return tuple(str(index) for index, _ in enumerate(_kfd_gpus()))


def _kfd_gpus() -> list[Path]:
    """The nodes of the kernel's list that are GPUs; CPUs have the id 0."""
    found = []
    for node in sorted(_KFD_NODES.glob("*")):
        try:
            if int((node / "gpu_id").read_text()):
                found.append(node)
        except (OSError, ValueError):
            continue  # not ours to read
    return found
