"""Accelerators that are no GPUs: which of them a node has, and which of those a worker may see.

One row per kind: its resource, and the variable in which its runtime looks up which devices to use. As for GPUs
(`gpu_visibility`), a variable that is set before the node starts lists the node's devices, and a worker's own are
written into it before any library is loaded.

Source: Ray 2.60, "Accelerator support"; the vendors' documents on these variables; kernel, accel/introduction.rst.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from hpcray.common.exceptions import StartupError
from hpcray.common.resources import ACCELERATOR_TYPE, ASSIGNED_ACCELERATORS, ASSIGNED_GPUS

# ------------------------------------------------------------ gpu visibility
# Which GPUs a process may see: those of the node, a rank's share of them, and a worker's own.
#
# Ids are opaque: an index ("0"), a UUID ("GPU-8c5…") or a part of a GPU ("MIG-…"), as the vendor's variable takes them.
# Inside an allocation only the environment counts: other GPUs of the machine belong to other jobs. A rank that shares
# its host, and its list of GPUs, with other ranks takes its part of the list, unless the launcher has given it GPUs of
# its own.
#
# Source: CUDA programming guide, "CUDA environment variables"; ROCm, "GPU isolation techniques"; Level Zero
# specification, "Affinity Mask"; Slurm, gres.html, srun(1), `--gpus-per-task` and SLURM_GPUS_ON_NODE; Ray 2.60,
# "Accelerator support".


CUDA = "CUDA_VISIBLE_DEVICES"
ROCR = "ROCR_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
SHARE = "HPCRAY_SHARE_GPUS"
"""Variable: with 1 each of several ranks on a host offers all GPUs of the host, instead of a part of them."""
MADE_UP = "HPCRAY_MADE_UP_GPUS"
"""Variable: with 1 the machine is not asked for its GPUs. Where `num_gpus` names a number, their ids are made up."""
LEVEL_ZERO = "ZE_AFFINITY_MASK"
ONEAPI = "ONEAPI_DEVICE_SELECTOR"

_NVIDIA = Path("/proc/driver/nvidia")
_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_DEVICES = Path("/dev")
_SLURM_LISTS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
_VALID = re.compile(r"\d+(?:\.\d+)?|(?!NoDevFiles$|none$|void$)[A-Za-z][\w./-]*")
_ONEAPI_PREFIX = "level_zero:"
_UUID_BYTES = 96


def visible_gpus(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Ids of the GPUs that this node may use, in the order of the vendor's variable.

    Inside a Slurm allocation the machine is never queried; outside, only where no variable limits this process, and
    `MADE_UP` does not forbid it.
    """
    environ = os.environ if environ is None else environ
    if is_amd(environ):
        return _amd(environ)
    if CUDA in environ:
        return _listed(environ[CUDA])
    if is_intel(environ):
        return _listed(environ.get(LEVEL_ZERO, environ.get(ONEAPI, "")).rpartition(_ONEAPI_PREFIX)[2])
    if "SLURM_JOB_ID" in environ:
        return _of_slurm(environ)
    return () if environ.get(MADE_UP) == "1" else _nvidia_of_machine()


def gpu_visibility_variables(ids: Sequence[str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that confine a worker to some of this node's GPUs. Set all of them before a GPU library is loaded.

    Args:
        ids: some of `visible_gpus()`; empty: no GPU.
        environ: the raylet's environment.
    """
    environ = os.environ if environ is None else environ
    wanted = ",".join(ids)
    if is_intel(environ):
        return {LEVEL_ZERO: wanted}
    if not is_amd(environ):
        return {CUDA: wanted}
    if ROCR not in environ:
        # HIP reads CUDA's variable too, when its own is not there, and both together confuse it.
        return {HIP: wanted, CUDA: wanted} if CUDA in environ else {HIP: wanted}
    # The lower layer hides the others and counts anew: for the upper layer the first one left is 0.
    counted = ",".join(str(index) for index in range(len(ids)))
    return {ROCR: wanted, **{name: counted for name in (HIP, CUDA) if name in environ}}


def gpu_visibility_variable(environ: Mapping[str, str] | None = None) -> str:
    """The variable whose ids `visible_gpus` returns: CUDA's, ROCR's or HIP's on AMD, or that of Intel's driver."""
    return next(iter(gpu_visibility_variables((), environ)))


def is_amd(environ: Mapping[str, str]) -> bool:
    """Slurm may set the variables of every vendor: the driver that is loaded decides."""
    if _NVIDIA.is_dir():
        return False
    if _KFD_NODES.is_dir() and any(_kfd_gpus()):
        return True
    return CUDA not in environ and (ROCR in environ or HIP in environ)


def is_intel(environ: Mapping[str, str]) -> bool:
    """True if a variable of Intel's lists GPUs, and no other vendor's does."""
    if LEVEL_ZERO not in environ and _ONEAPI_PREFIX not in environ.get(ONEAPI, ""):
        return False
    return CUDA not in environ and not _NVIDIA.is_dir() and not is_amd(environ)


def _amd(environ: Mapping[str, str]) -> tuple[str, ...]:
    """ROCR's list is the node's; HIP's counts within it."""
    upper = environ.get(HIP, environ.get(CUDA))
    if ROCR not in environ:
        if upper is not None:
            return _listed(upper)
        if "SLURM_JOB_ID" in environ:
            return _of_slurm(environ)
        return () if environ.get(MADE_UP) == "1" else _amd_of_machine()
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
    """True if a GPU of this machine that is not ours cannot be opened: the cgroup denies it."""
    for device in _DEVICES.glob("nvidia[0-9]*"):
        if device.name.removeprefix("nvidia") not in ids:
            try:
                os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
            except OSError as error:
                return error.errno == errno.EPERM
            return False
    return False


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


OVERRIDE_ON_ZERO = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
"""Set to 1, this variable hides all GPUs from workers without GPUs; else they see all of the node, as in Ray 2.60."""
NOSET = "RAY_EXPERIMENTAL_NOSET_"
"""Prefix to the name of a variable that the program sets itself."""

_LOCAL_RANK = (
    "OMPI_COMM_WORLD_LOCAL_RANK", "FLUX_TASK_LOCAL_ID", "SLURM_LOCALID", "MPI_LOCALRANKID", "PMI_LOCAL_RANK",
)  # fmt: skip
_TYPE_VARIABLES = (
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPUS",
    "SLURM_GPUS_PER_SOCKET",
    "SLURM_TRES_PER_TASK",
)
_TYPE = re.compile(r"(?:^|,)(?:gpu:)?([A-Za-z][\w.-]*):\d|gres/gpu:([A-Za-z][\w.-]*)=\d")
_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
_AMD_TYPES = {
    0x66A1: "AMD-Instinct-MI50",
    0x738C: "AMD-Instinct-MI100",
    0x7408: "AMD-Instinct-MI250X",
    0x740C: "AMD-Instinct-MI250X-MI250",
    0x740F: "AMD-Instinct-MI210",
    0x74A0: "AMD-Instinct-MI300A",
    0x74A1: "AMD-Instinct-MI300X-OAM",
    0x74A2: "AMD-Instinct-MI308X-OAM",
    0x74A5: "AMD-Instinct-MI325X-OAM",
    0x74A9: "AMD-Instinct-MI300X-HF",
    0x75A0: "AMD-Instinct-MI350X-OAM",
    0x75A3: "AMD-Instinct-MI355X-OAM",
}
_UNNAMED = ("", "gpu")


def node_gpus(wanted: float | None, local_size: int, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Ids of the GPUs that this node offers.

    Args:
        wanted: the number that the user set, None: all. Without any real GPU, ids are made up: "0", "1", …
        local_size: ranks on this host.
        environ: None: ours.

    Raises:
        StartupError: a variable makes fewer GPUs visible.
        ValueError: not a whole number.
    """
    environ = os.environ if environ is None else environ
    if wanted == 0:
        return ()
    if wanted is not None and (wanted < 0 or wanted != int(wanted)):
        raise ValueError(f"num_gpus={wanted:g} of a node must be a whole number; hint: tasks may ask for fractions")
    found = own_part(visible_gpus(environ), local_size, environ)
    if wanted is None:
        return found
    count = int(wanted)
    if count <= len(found):
        return found[:count]
    if found or gpu_visibility_variable(environ) in environ:
        name = gpu_visibility_variable(environ)
        raise StartupError(
            f"this node shall have {count} GPUs, but it was given {len(found)}: {name}={environ.get(name, '')!r}, "
            f"{local_size} rank(s) on this host. hint: ask for fewer, or leave num_gpus out"
            + (f"; {SHARE}=1 has the ranks of a host share its GPUs" if local_size > 1 else "")
        )
    return tuple(str(index) for index in range(count))


def local_rank(environ: Mapping[str, str]) -> int:
    """Number of this rank among those of its host; -1 if no launcher sets it."""
    return next((int(environ[name]) for name in _LOCAL_RANK if environ.get(name, "").isdecimal()), -1)


def gpu_type(environ: Mapping[str, str] | None = None) -> str:
    """Ray's name for the type of this node's GPUs ("H100"), "" if unknown. For nodes with GPUs only."""
    environ = os.environ if environ is None else environ
    for about in sorted(_NVIDIA_GPUS.glob("*/information")):
        for line in _lines(about):
            if line.startswith("Model:"):
                return gpu_type_of_model(line.removeprefix("Model:").strip())
    for about in sorted(_KFD_NODES.glob("*/properties")):
        facts = dict(line.split(" ", 1) for line in _lines(about) if " " in line)
        if int(facts.get("simd_count", 0)):
            return _AMD_TYPES.get(int(facts.get("device_id", 0)), "")
    for variable in _TYPE_VARIABLES:
        match = _TYPE.search(environ.get(variable, ""))
        name = (match[1] or match[2]) if match else ""
        if name not in _UNNAMED:
            return name.upper()
    return ""


def gpu_type_of_model(model: str) -> str:
    """Ray's name for a model: A100 for `NVIDIA A100-SXM4-40GB`, GeForce-RTX-5090 for `NVIDIA GeForce RTX 5090`."""
    taken: list[str] = []
    for word in model.split()[1:]:
        stem = re.match(r"[A-Z0-9]*", word)
        head = stem[0] if stem else ""
        if len(head) > 1 and any(letter.isdigit() for letter in head):
            return "-".join([*taken, head])
        if head != word:
            break
        taken.append(word)
    return "-".join(model.removeprefix("NVIDIA ").split())


def own_part(ids: tuple[str, ...], local_size: int, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The share of this rank in a list that all ranks of the host see; the first ranks get the remainder."""
    if local_size <= 1 or environ.get(SHARE) == "1" or _has_gpus_of_its_own(ids, environ):
        return ids
    rank = local_rank(environ)
    if rank < 0:
        return ids
    each, more = divmod(len(ids), local_size)
    first = rank * each + min(rank, more)
    return ids[first : first + each + (rank < more)]


def _has_gpus_of_its_own(ids: tuple[str, ...], environ: Mapping[str, str]) -> bool:
    """True if srun bound GPUs to tasks, as `--gpus-per-task` does: then a rank's list is shorter than the step's."""
    if "OMPI_COMM_WORLD_LOCAL_RANK" in environ:
        return False  # mpirun inside an allocation: the variables speak of the allocation
    of_step = environ.get("SLURM_GPUS_ON_NODE", "")
    return of_step.isdecimal() and len(ids) < int(of_step)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


class _Confinement:
    """The GPUs of this worker. `base`: the node's environment. `done`: the variables that we have set."""

    ids: tuple[str, ...] = ()
    done: Mapping[str, str] = {}
    numbered: bool = True
    base: Mapping[str, str] | None = None


def record_node_environment(environ: Mapping[str, str]) -> None:
    """Remember the node's environment. Call it in the fork server, before `environ` holds anything of a worker."""
    _Confinement.base = dict(environ)
    _Confinement.numbered = gpu_visibility_variable(environ) not in environ


def apply_gpu_visibility(environ: MutableMapping[str, str]) -> None:
    """The part of `accelerators.apply_device_visibility` for GPUs."""
    if _Confinement.base is None:
        record_node_environment(environ)
    assigned = environ.pop(ASSIGNED_GPUS, None)
    if assigned is not None:
        _Confinement.ids = tuple(assigned.split(","))
    if not _Confinement.ids and not is_true(environ, OVERRIDE_ON_ZERO):
        return
    base = _Confinement.base or {}
    wanted = gpu_visibility_variables(_Confinement.ids, base)
    if not any(is_true(environ, NOSET + name) for name in wanted):
        environ.update(wanted)
        _Confinement.done = wanted
        return
    for name, text in _Confinement.done.items():
        if environ.get(name) == text:
            del environ[name]
            environ.update({name: base[name]} if name in base else {})
    _Confinement.done = {}


def gpu_visibility_state() -> dict[str, Any]:
    """The worker's GPUs, to be passed to another Python that takes its place; see `restore_gpu_visibility`."""
    return {"ids": _Confinement.ids, "done": dict(_Confinement.done), "numbered": _Confinement.numbered,
            "base": dict(_Confinement.base or {})}  # fmt: skip


def restore_gpu_visibility(state: Mapping[str, Any]) -> None:
    """Continue as the worker with this `gpu_visibility_state`."""
    _Confinement.ids = tuple(state["ids"])
    _Confinement.done, _Confinement.base = state["done"], state["base"]
    _Confinement.numbered = state["numbered"]


def assigned_gpus() -> list[str]:
    """Ids of the GPUs that this worker has; none in a driver."""
    return list(_Confinement.ids)


def gpu_ids_are_indices() -> bool:
    """True if the ids are the machine's indices, and not names out of a variable that was set before."""
    return _Confinement.numbered and all(name.isdecimal() for name in _Confinement.ids)


def listed(text: str | None) -> list[str] | None:
    """The ids in the value of a variable; None where it is not set."""
    if text is None:
        return None
    return [] if text in ("", "NoDevFiles") else text.split(",")


def is_true(environ: Mapping[str, str], name: str) -> bool:
    """True if a variable that switches something on does so."""
    return environ.get(name, "").lower() in ("1", "true")


# ------------------------------------------------------------ accelerators


_DEVICE_FILES, _SYS = Path("/dev"), Path("/sys")
_NEURON_LS = Path("/opt/aws/neuron/bin/neuron-ls")
_NEURON_LS_TIMEOUT = 10.0  # seconds
_GOOGLE, _HABANA = "0x1ae0", "0x1da3"  # PCI vendors
_CHIPS_PER_HOST, _HOSTS = "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_HOST_BOUNDS"
_CHIPS_BOUNDS = {1: "1,1,1", 2: "1,2,1"}


class Accelerator(Struct, frozen=True):
    """A kind of accelerator.

    Attributes:
        resource: its name. variable: lists the visible devices of a process. noset: ends the name of the variable that
            leaves `variable` to the program; "": it is the same.
        count: the number of devices of this machine.
        amounts: the quantities that can be requested; (): any whole number; None: any.
        type_name: Ray's name of the type, "" if unknown.
        prefix: of each id in the variable.
    """

    resource: str
    variable: str
    count: Callable[[], int]
    noset: str = ""
    amounts: tuple[int, ...] | None = ()
    type_name: Callable[[Mapping[str, str]], str] = lambda environ: ""
    prefix: str = ""

    @property
    def noset_variable(self) -> str:
        """The variable that leaves `variable` to the program."""
        return NOSET + (self.noset or self.variable)

    def visible(self, environ: Mapping[str, str]) -> list[str] | None:
        """Ids of the devices that a process may see; None: all of them."""
        found = listed(environ.get(self.variable))
        return found and [one.strip().removeprefix(self.prefix) for one in found if one]

    def variables(self, ids: Sequence[str]) -> dict[str, str]:
        """The variables that confine a process to these devices."""
        wanted = {self.variable: ",".join(f"{self.prefix}{one.removeprefix(self.prefix)}" for one in ids)}
        if self.resource != "TPU":
            return wanted
        if ids and len(ids) == self.count():
            return {}  # the whole host: its library finds the chips and how they are connected
        if len(ids) in _CHIPS_BOUNDS:
            wanted.update({_CHIPS_PER_HOST: _CHIPS_BOUNDS[len(ids)], _HOSTS: "1,1,1"})
        return wanted

    def amount_problem(self, quantity: float) -> str | None:
        """Why no task can request this amount; None if it can."""
        if self.amounts and quantity not in self.amounts:
            return (
                f"The number of requested '{self.resource}' was set to {quantity} which is not a supported chip "
                f"configuration. Supported configs: {self.amounts}"
            )
        if self.amounts == () and quantity != int(quantity):
            return (
                f"{self.resource} resource quantity must be whole numbers. "
                f"The specified quantity {quantity} is invalid."
            )
        return None


def _files(pattern: str) -> int:
    return sum(not path.is_dir() for path in _DEVICE_FILES.glob(pattern))


def _of_vendor(pattern: str, vendor: str) -> int:
    found = 0
    for path in _SYS.glob(pattern):
        with contextlib.suppress(OSError):
            found += path.read_text().strip().lower() == vendor
    return found


def _tpus() -> int:
    return _files("accel[0-9]*") or sum(
        bool(_of_vendor(f"kernel/iommu_groups/{path.name}/devices/*/vendor", _GOOGLE))
        for path in _DEVICE_FILES.glob("vfio/[0-9]*")
    )


def _neuron_cores() -> int:
    if not _NEURON_LS.exists():
        return 0
    import subprocess  # few nodes need it

    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        line = [str(_NEURON_LS), "--json-output"]
        found = subprocess.run(line, capture_output=True, timeout=_NEURON_LS_TIMEOUT, check=True).stdout
        return sum(int(device.get("nc_count", 0)) for device in json.loads(found))
    return 0


def _tpu_type(environ: Mapping[str, str]) -> str:
    version = environ.get("TPU_ACCELERATOR_TYPE", "").partition("-")[0]
    return f"TPU-{version.upper()}" if version else ""


KINDS: dict[str, Accelerator] = {
    one.resource: one
    for one in (
        Accelerator("TPU", "TPU_VISIBLE_CHIPS", _tpus, amounts=(1, 2, 4, 8), type_name=_tpu_type),
        Accelerator("NPU", "ASCEND_RT_VISIBLE_DEVICES", lambda: _files("davinci[0-9]*"), amounts=None),
        Accelerator("HPU", "HABANA_VISIBLE_MODULES", lambda: _of_vendor("class/accel/*/device/vendor", _HABANA)),
        Accelerator(
            "neuron_cores", "NEURON_RT_VISIBLE_CORES", _neuron_cores, type_name=lambda environ: "aws-neuron-core"
        ),
        Accelerator("RBLN", "RBLN_DEVICES", lambda: _files("rbln[0-9]*"), "RBLN_RT_VISIBLE_DEVICES"),
        Accelerator("FURIOSA", "FURIOSA_DEVICES", lambda: _files("rngd/npu[0-9]*mgmt"), prefix="npu:"),
        Accelerator(
            "MBLT",
            "QBRUNTIME_VISIBLE_DEVICES",
            lambda: _files("aries[0-9]*") or _files("regulus-npu*"),
            "MBLT_RT_VISIBLE_DEVICES",
        ),
        Accelerator("TTNPU", "TT_VISIBLE_DEVICES", lambda: _files("tenstorrent/*"), "TENSTORRENT_VISIBLE_DEVICES"),
    )
}
"""By resource."""


def node_accelerators(
    given: Mapping[str, float], local_size: int, environ: Mapping[str, str] | None = None
) -> dict[str, tuple[str, ...]]:
    """Ids of the accelerators that this node offers, by resource.

    Args:
        given: the custom resources that the user set; accelerators among them need not exist.
        local_size: ranks on this host, which share what it has.
        environ: None: ours.

    Raises:
        StartupError: a variable makes fewer of them visible than the user set.
    """
    environ = os.environ if environ is None else environ
    offered: dict[str, tuple[str, ...]] = {}
    for name, kind in KINDS.items():
        wanted, visible = given.get(name), kind.visible(environ)
        if wanted == 0 or (wanted is not None and wanted != int(wanted)):
            continue
        if wanted is not None and visible is None:
            offered[name] = _numbered(int(wanted))
            continue
        if visible is None:
            ids = own_part(_numbered(kind.count()), local_size, environ)
        elif wanted is None:
            ids = own_part(tuple(visible[: kind.count()]), local_size, environ)
        else:
            ids = own_part(tuple(visible), local_size, environ)
            if wanted > len(ids):
                raise StartupError(
                    f"this node shall have {wanted:g} {name}, but it was given {len(ids)}: "
                    f"{kind.variable}={environ[kind.variable]!r}, {local_size} rank(s) on this host. "
                    "hint: ask for fewer, or leave the resource out"
                )
            ids = ids[: int(wanted)]
        if ids:
            offered[name] = ids
    return offered


def accelerator_resources(offered: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> dict[str, float]:
    """The resources of a node for the accelerators that it offers, with their types."""
    found: dict[str, float] = {name: len(ids) for name, ids in offered.items()}
    for name in offered:
        if type_name := KINDS[name].type_name(environ):
            found[ACCELERATOR_TYPE + type_name] = 1
    return found


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(str(index) for index in range(count))


class _Assigned:
    """The accelerators of this worker, by resource."""

    ids: Mapping[str, list[str]] = {}


def assigned_accelerators() -> dict[str, list[str]]:
    """Ids of the accelerators that this worker has, by resource; none in a driver."""
    return {name: list(ids) for name, ids in _Assigned.ids.items()}


def device_visibility_state() -> dict[str, Any]:
    """The worker's devices, to be passed to another Python that takes its place; see `restore_device_visibility`."""
    return {**gpu_visibility_state(), "accelerators": assigned_accelerators()}


def restore_device_visibility(state: Mapping[str, Any]) -> None:
    """Continue as the worker with this `device_visibility_state`."""
    restore_gpu_visibility(state)
    _Assigned.ids = {name: list(ids) for name, ids in state["accelerators"].items()}


def apply_device_visibility(environ: MutableMapping[str, str]) -> None:
    """Make visible to this worker the GPUs and other accelerators that it was forked for, and no others of their kind.
    Called after anything else that changes `environ`, so that neither a `runtime_env` nor the driver can undo it,
    except by the variables that Ray has for that."""
    apply_gpu_visibility(environ)
    if (text := environ.pop(ASSIGNED_ACCELERATORS, None)) is not None:
        pairs = (one.partition("=") for one in text.split(";"))
        _Assigned.ids = {name: ids.split(",") for name, _, ids in pairs}
    wanted = KINDS if is_true(environ, OVERRIDE_ON_ZERO) else _Assigned.ids
    for name in wanted:
        kind = KINDS[name]
        if not is_true(environ, kind.noset_variable):
            environ.update(kind.variables(_Assigned.ids.get(name, [])))
