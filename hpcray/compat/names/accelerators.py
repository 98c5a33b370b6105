"""Names of `ray._private.accelerators`: one class per kind of accelerator."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from typing import ClassVar

from hpcray.common.resources import ACCELERATORS
from hpcray.platform.accelerators import (
    CUDA,
    HIP,
    KINDS,
    LEVEL_ZERO,
    NOSET,
    ONEAPI,
    OVERRIDE_ON_ZERO,
    gpu_type,
    is_amd,
    is_intel,
    is_true,
    listed,
    node_gpus,
)

CUDA_VISIBLE_DEVICES_ENV_VAR = CUDA
HIP_VISIBLE_DEVICES_ENV_VAR = HIP
ZE_AFFINITY_MASK_ENV_VAR = LEVEL_ZERO
ONEAPI_DEVICE_SELECTOR_ENV_VAR = ONEAPI
NEURON_RT_VISIBLE_CORES_ENV_VAR = KINDS["neuron_cores"].variable
TPU_VISIBLE_CHIPS_ENV_VAR = KINDS["TPU"].variable
HPU_PACKAGE_AVAILABLE = find_spec("habana_frameworks") is not None
HABANA_VISIBLE_DEVICES_ENV_VAR = KINDS["HPU"].variable
ASCEND_RT_VISIBLE_DEVICES_ENV_VAR = KINDS["NPU"].variable
NOSET_CUDA_VISIBLE_DEVICES_ENV_VAR = NOSET + CUDA
NOSET_HIP_VISIBLE_DEVICES_ENV_VAR = NOSET + HIP
NOSET_ZE_AFFINITY_MASK_ENV_VAR = NOSET + LEVEL_ZERO
NOSET_AWS_NEURON_RT_VISIBLE_CORES_ENV_VAR = KINDS["neuron_cores"].noset_variable
NOSET_TPU_VISIBLE_CHIPS_ENV_VAR = KINDS["TPU"].noset_variable
NOSET_HABANA_VISIBLE_MODULES_ENV_VAR = KINDS["HPU"].noset_variable
NOSET_ASCEND_RT_VISIBLE_DEVICES_ENV_VAR = KINDS["NPU"].noset_variable
RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO_ENV_VAR = OVERRIDE_ON_ZERO
TPU_VALID_CHIP_OPTIONS = KINDS["TPU"].amounts


class AcceleratorManager(ABC):
    """Base class of accelerator types. hpcray calls no subclass of it."""

    @staticmethod
    @abstractmethod
    def get_resource_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_visible_accelerator_ids_env_var() -> str | None:
        """Return the environment variable that lists the visible devices of a process."""

    @staticmethod
    @abstractmethod
    def get_current_node_num_accelerators() -> int:
        """Return the number of devices of this node."""

    @staticmethod
    @abstractmethod
    def get_current_node_accelerator_type() -> str | None:
        """Return the device type of this node."""

    @staticmethod
    @abstractmethod
    def validate_resource_request_quantity(quantity: float) -> tuple[bool, str | None]:
        """Return whether tasks can request so many, and why not."""

    @staticmethod
    @abstractmethod
    def get_current_process_visible_accelerator_ids() -> list[str] | None:
        """Return the ids of the visible devices of this process; None for all."""

    @staticmethod
    @abstractmethod
    def set_current_process_visible_accelerator_ids(ids: Sequence[str]) -> None:
        """Set the visible devices of this process, unless a `RAY_EXPERIMENTAL_NOSET_` variable is set."""

    @staticmethod
    def get_current_node_additional_resources() -> dict[str, float] | None:
        """Return None: no kind adds resources to a node."""
        return None

    @staticmethod
    def get_current_node_accelerator_labels() -> dict[str, str] | None:
        """Return None: no kind adds labels to a node."""
        return None


class _GpuManager(AcceleratorManager):
    """GPUs of one vendor."""

    variable: ClassVar[str]

    @classmethod
    def _is_here(cls) -> bool:
        return not is_amd(os.environ) and not is_intel(os.environ)

    @staticmethod
    def get_resource_name() -> str:
        return "GPU"

    @classmethod
    def get_visible_accelerator_ids_env_var(cls) -> str:
        """Return the environment variable that lists the visible devices of a process."""
        return cls.variable

    @classmethod
    def get_current_process_visible_accelerator_ids(cls) -> list[str] | None:
        """Return the ids of the visible devices of this process; None for all."""
        return listed(os.environ.get(cls.get_visible_accelerator_ids_env_var()))

    @classmethod
    def set_current_process_visible_accelerator_ids(cls, ids: Sequence[str]) -> None:
        """Set the visible devices of this process, unless RAY_EXPERIMENTAL_NOSET_<variable> is set."""
        variable = cls.get_visible_accelerator_ids_env_var()
        if not is_true(os.environ, NOSET + variable):
            os.environ[variable] = ",".join(map(str, ids))

    @classmethod
    def get_current_node_num_accelerators(cls) -> int:
        """Return the number of devices of this node."""
        return len(node_gpus(None, 1)) if cls._is_here() else 0

    @classmethod
    def get_current_node_accelerator_type(cls) -> str | None:
        """Return Ray's name of the GPU type; None for an unknown type."""
        return (gpu_type() or None) if cls._is_here() else None

    @staticmethod
    def validate_resource_request_quantity(quantity: float) -> tuple[bool, str | None]:
        """Return True: GPUs can be shared."""
        return True, None


class NvidiaGPUAcceleratorManager(_GpuManager):
    """The NVIDIA GPUs of this node."""

    variable = CUDA


class AMDGPUAcceleratorManager(_GpuManager):
    """The AMD GPUs of this node."""

    variable = HIP

    @classmethod
    def _is_here(cls) -> bool:
        return is_amd(os.environ)

    @classmethod
    def get_visible_accelerator_ids_env_var(cls) -> str:
        """Return HIP's variable.

        Raises:
            RuntimeError: only ROCR_VISIBLE_DEVICES is set.
        """
        if HIP not in os.environ and "ROCR_VISIBLE_DEVICES" in os.environ:
            raise RuntimeError(f"Please use {HIP} instead of ROCR_VISIBLE_DEVICES")
        return HIP


class IntelGPUAcceleratorManager(_GpuManager):
    """The Intel GPUs of this node."""

    variable = LEVEL_ZERO

    @classmethod
    def _is_here(cls) -> bool:
        return is_intel(os.environ)

    @classmethod
    def get_current_process_visible_accelerator_ids(cls) -> list[str] | None:
        """Return the ids of the visible devices of this process; None for all."""
        if LEVEL_ZERO not in os.environ and ONEAPI in os.environ:
            return listed(os.environ[ONEAPI].rpartition("level_zero:")[2])
        return super().get_current_process_visible_accelerator_ids()


class _KindManager(AcceleratorManager):
    """Accelerators of a kind of `KINDS`."""

    resource: ClassVar[str]

    @classmethod
    def get_resource_name(cls) -> str:
        return cls.resource

    @classmethod
    def get_visible_accelerator_ids_env_var(cls) -> str:
        """Return the environment variable that lists the visible devices of a process."""
        return KINDS[cls.resource].variable

    @classmethod
    def get_current_process_visible_accelerator_ids(cls) -> list[str] | None:
        """Return the ids of the visible devices of this process; None for all."""
        return KINDS[cls.resource].visible(os.environ)

    @classmethod
    def set_current_process_visible_accelerator_ids(cls, ids: Sequence[str]) -> None:
        """Set the visible devices of this process, unless a `RAY_EXPERIMENTAL_NOSET_` variable is set."""
        kind = KINDS[cls.resource]
        if not is_true(os.environ, kind.noset_variable):
            os.environ.update(kind.variables([str(one) for one in ids]))

    @classmethod
    def get_current_node_num_accelerators(cls) -> int:
        """Return the number of devices of this node."""
        return KINDS[cls.resource].count()

    @classmethod
    def get_current_node_accelerator_type(cls) -> str | None:
        """Return Ray's name of the type; None for an unknown type."""
        return KINDS[cls.resource].type_name(os.environ) or None

    @classmethod
    def validate_resource_request_quantity(cls, quantity: float) -> tuple[bool, str | None]:
        """Return whether tasks can request so many, and why not."""
        problem = KINDS[cls.resource].amount_problem(quantity)
        return problem is None, problem


class TPUAcceleratorManager(_KindManager):
    """Google's TPUs."""

    resource = "TPU"


class NPUAcceleratorManager(_KindManager):
    """Huawei's Ascend NPUs."""

    resource = "NPU"


class HPUAcceleratorManager(_KindManager):
    """Intel's Gaudi accelerators."""

    resource = "HPU"


class NeuronAcceleratorManager(_KindManager):
    """The cores of AWS Inferentia and Trainium."""

    resource = "neuron_cores"


class RBLNAcceleratorManager(_KindManager):
    """Rebellions' NPUs."""

    resource = "RBLN"


class FuriosaAcceleratorManager(_KindManager):
    """Furiosa's NPUs."""

    resource = "FURIOSA"


class MBLTAcceleratorManager(_KindManager):
    """Mobilint's NPUs."""

    resource = "MBLT"


class TTNPUAcceleratorManager(_KindManager):
    """Tenstorrent's accelerators."""

    resource = "TTNPU"


_GPUS = (AMDGPUAcceleratorManager, IntelGPUAcceleratorManager, NvidiaGPUAcceleratorManager)
_KINDS = {
    manager.resource: manager
    for manager in (
        TPUAcceleratorManager,
        NPUAcceleratorManager,
        HPUAcceleratorManager,
        NeuronAcceleratorManager,
        RBLNAcceleratorManager,
        FuriosaAcceleratorManager,
        MBLTAcceleratorManager,
        TTNPUAcceleratorManager,
    )
}


def get_all_accelerator_managers() -> set[type[AcceleratorManager]]:
    """Return the accelerator types that hpcray knows."""
    return {*_GPUS, *_KINDS.values()}


def get_all_accelerator_resource_names() -> set[str]:
    """Return the names of the resources that count devices."""
    return set(ACCELERATORS)


def get_accelerator_manager_for_resource(resource_name: str) -> type[AcceleratorManager] | None:
    """Return the accelerator type that the resource counts on this node, or None."""
    if resource_name == "GPU":
        return next((one for one in _GPUS if one._is_here()), NvidiaGPUAcceleratorManager)
    return _KINDS.get(resource_name)
