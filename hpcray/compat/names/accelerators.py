"""`ray._private.accelerators` and its submodules: the GPUs of a node."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

from hpcray.api.runtime_context import ACCELERATORS
from hpcray.compat.names.ray_constants import (
    CUDA_VISIBLE_DEVICES_ENV_VAR,
    NOSET_CUDA_VISIBLE_DEVICES_ENV_VAR,
)
from hpcray.platform.gpu_visibility import gpu_type, node_gpus


class AcceleratorManager(ABC):
    """Base class of accelerator types. hpcray calls no subclass of it."""

    @staticmethod
    @abstractmethod
    def get_resource_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_visible_accelerator_ids_env_var() -> str:
        """Return the environment variable that lists the visible devices of a process."""

    @staticmethod
    @abstractmethod
    def get_current_node_num_accelerators() -> int:
        """Return the number of devices of this node."""

    @staticmethod
    @abstractmethod
    def get_current_node_accelerator_type() -> str | None:
        """Return the device type of this node."""


class NvidiaGPUAcceleratorManager(AcceleratorManager):
    """The NVIDIA GPUs of this node."""

    @staticmethod
    def get_resource_name() -> str:
        return "GPU"

    @staticmethod
    def get_visible_accelerator_ids_env_var() -> str:
        return CUDA_VISIBLE_DEVICES_ENV_VAR

    @staticmethod
    def get_current_process_visible_accelerator_ids() -> list[str] | None:
        """Return the ids of the visible devices of this process; None for all."""
        text = os.environ.get(CUDA_VISIBLE_DEVICES_ENV_VAR)
        if text is None:
            return None
        return [] if text in ("", "NoDevFiles") else text.split(",")

    @staticmethod
    def set_current_process_visible_accelerator_ids(visible_cuda_devices: list[str]) -> None:
        """Set the visible devices of this process, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set."""
        if not os.environ.get(NOSET_CUDA_VISIBLE_DEVICES_ENV_VAR):
            os.environ[CUDA_VISIBLE_DEVICES_ENV_VAR] = ",".join(map(str, visible_cuda_devices))

    @staticmethod
    def get_current_node_num_accelerators() -> int:
        """Return the number of devices of this node."""
        return len(node_gpus(None, 1))

    @staticmethod
    def get_current_node_accelerator_type() -> str | None:
        """Return Ray's name of the GPU type; None for an unknown type."""
        return gpu_type() or None


def get_all_accelerator_managers() -> set[type[AcceleratorManager]]:
    """Return the accelerator types that hpcray detects."""
    return {NvidiaGPUAcceleratorManager}


def get_all_accelerator_resource_names() -> set[str]:
    """Return the names of the resources that count devices."""
    return set(ACCELERATORS)


def get_accelerator_manager_for_resource(resource_name: str) -> type[AcceleratorManager] | None:
    """Return the accelerator type that the resource counts, or None."""
    return NvidiaGPUAcceleratorManager if resource_name == "GPU" else None
