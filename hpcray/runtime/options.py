"""What the user asks of one node, as it travels from `hpcray.init()` or a command line to the raylet process."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from hpcray.base.config import Config
from hpcray.base.labels import parse_labels
from hpcray.base.resources import Resources, to_units
from hpcray.host import probe
from hpcray.host.accelerators import local_rank
from hpcray.host.binding import RankPlan, bind_rank, plan_rank

HEAD_RESOURCE = "node:__internal_head__"


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts are the user's (CPU: 0.5); None means: find out.

    Attributes:
        config: the settings that were given, by name; the others come from the environment or are defaults.
        num_cpus: CPUs of this node.
        num_gpus: GPUs of this node; where it has been given none, as many are made up.
        memory: bytes that tasks may ask for with `memory=`.
        resources: the node's custom resources.
        distributed: whether this process is a rank of a launcher, or the only node.
        broadcast_env: a directory that rank 0 reads and all nodes get a copy of; "": none.
        driver: the driver's command line after the interpreter, when a rank is to start one; else empty.
    """

    config: dict[str, Any] = {}
    num_cpus: float | None = None
    num_gpus: float | None = None
    memory: float | None = None
    resources: dict[str, float] = {}
    distributed: bool = False
    broadcast_env: str = ""
    driver: list[str] = []

    def settings(self) -> Config:
        """The node's settings.

        Raises:
            ValueError: a setting or a variable is not valid.
        """
        config = Config.from_env(**self.config)
        parse_labels(config.labels)
        return config


def bind_node(
    options: NodeOptions, config: Config, local_size: int, gpus: tuple[str, ...]
) -> tuple[NodeOptions, RankPlan]:
    """Bind this process, where that is for the better. Before the template process is forked, which inherits it.

    Args:
        options: what the user gave.
        config: the node's settings.
        local_size: ranks on this host.
        gpus: ids of the node's GPUs.

    Returns:
        The options, with the number of CPUs in them: these are counted before. And the plan that was carried out.
    """
    cpus = options.num_cpus if options.num_cpus is not None else probe.cpus_per_rank(local_size)
    plan = plan_rank(gpus, local_rank(os.environ), local_size, cpus, os.environ, config.bind)
    bind_rank(plan)
    return msgspec.structs.replace(options, num_cpus=cpus), plan


def total_resources(
    options: NodeOptions, address: str, node: int, local_size: int, arena_size: int, gpus: int = 0, gpu_type: str = ""
) -> Resources:
    """What this node offers.

    Args:
        options: what the user gave.
        address: the node's IP address.
        node: its index.
        local_size: ranks on this host, which share what it has.
        arena_size: bytes of its object store.
        gpus: how many it has.
        gpu_type: Ray's name for their type, "" if unknown.

    Raises:
        ValueError: a given amount is not valid.
    """
    cpus = options.num_cpus if options.num_cpus is not None else probe.cpus_per_rank(local_size)
    memory = options.memory
    if memory is None:
        memory = max(0, probe.usable_memory() // local_size - arena_size)
    amounts: dict[str, float] = {
        **options.resources,
        "CPU": cpus,
        "GPU": gpus,
        "memory": int(memory),
        "object_store_memory": arena_size,
        f"node:{address}": 1,
    }
    if gpus and gpu_type:
        amounts.setdefault(f"accelerator_type:{gpu_type}", 1)
    if node == 0:
        amounts[HEAD_RESOURCE] = 1
    return to_units(amounts)
