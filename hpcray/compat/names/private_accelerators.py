"""`ray._private.accelerators`: the part that other packages ask."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

from hpcray.api.runtime_context import ACCELERATORS
from hpcray.host.accelerators import gpu_type, node_gpus

CUDA_VISIBLE_DEVICES_ENV_VAR = "CUDA_VISIBLE_DEVICES"
NOSET_CUDA_VISIBLE_DEVICES_ENV_VAR = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"

__all__ = [
    "AcceleratorManager",
    "NvidiaGPUAcceleratorManager",
    "get_accelerator_manager_for_resource",
    "get_all_accelerator_managers",
    "get_all_accelerator_resource_names",
]


class AcceleratorManager(ABC):
    """A kind of device. For subclasses of others; hpcray asks none."""

    @staticmethod
    @abstractmethod
    def get_resource_name() -> str:
        """Name of the resource."""

    @staticmethod
    @abstractmethod
    def get_visible_accelerator_ids_env_var() -> str:
        """The variable that says which devices a process may see."""

    @staticmethod
    @abstractmethod
    def get_current_node_num_accelerators() -> int:
        """How many this node has."""

    @staticmethod
    @abstractmethod
    def get_current_node_accelerator_type() -> str | None:
        """Their type."""


class NvidiaGPUAcceleratorManager(AcceleratorManager):
    """GPUs, as hpcray finds them."""

    @staticmethod
    def get_resource_name() -> str:
        """GPU."""
        return "GPU"

    @staticmethod
    def get_visible_accelerator_ids_env_var() -> str:
        """CUDA_VISIBLE_DEVICES."""
        return CUDA_VISIBLE_DEVICES_ENV_VAR

    @staticmethod
    def get_current_process_visible_accelerator_ids() -> list[str] | None:
        """Those that this process may see; None for all."""
        text = os.environ.get(CUDA_VISIBLE_DEVICES_ENV_VAR)
        if text is None:
            return None
        return [] if text in ("", "NoDevFiles") else text.split(",")

    @staticmethod
    def set_current_process_visible_accelerator_ids(visible_cuda_devices: list[str]) -> None:
        """Let this process see these, unless the user forbids it."""
        if not os.environ.get(NOSET_CUDA_VISIBLE_DEVICES_ENV_VAR):
            os.environ[CUDA_VISIBLE_DEVICES_ENV_VAR] = ",".join(map(str, visible_cuda_devices))

    @staticmethod
    def get_current_node_num_accelerators() -> int:
        """How many this node has."""
        return len(node_gpus(None, 1))

    @staticmethod
    def get_current_node_accelerator_type() -> str | None:
        """Ray's name for their type; None where it is not known."""
        return gpu_type() or None


def get_all_accelerator_managers() -> set[type[AcceleratorManager]]:
    """The kinds that hpcray finds by itself."""
    return {NvidiaGPUAcceleratorManager}


def get_all_accelerator_resource_names() -> set[str]:
    """Names of resources that stand for devices."""
    return set(ACCELERATORS)


def get_accelerator_manager_for_resource(resource_name: str) -> type[AcceleratorManager] | None:
    """The kind with this resource; None for none."""
    return NvidiaGPUAcceleratorManager if resource_name == "GPU" else None
