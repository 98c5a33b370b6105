"""The options of one node, from `hpcray.init()` or a command line to the raylet process."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import msgspec

from hpcray.common.config import Config, parse_size
from hpcray.common.labels import labels_text, parse_labels
from hpcray.common.resources import ACCELERATOR_TYPE, Resources, to_units
from hpcray.platform import resource_limits
from hpcray.platform.accelerators import local_rank
from hpcray.platform.config_files import node_config
from hpcray.platform.numa_binding import RankPlan, bind_rank, plan_rank

NODE_ID, NODE_NAME = "HPCRAY_NODE_ID", "HPCRAY_NODE_NAME"
"""Variables of one node: its id in hex, and its name."""
INSTANCE = "HPCRAY_INSTANCE_ID"
"""Variable of a node that the autoscaler has started: the batch job that it knows the node by."""
OUTLIVES = "HPCRAY_OUTLIVES_STARTER"
"""Variable of a node that stays in its job when the process that has started it ends, as a command does."""
NODE_ID_BYTES = 28
HEAD_RESOURCE = "node:__internal_head__"

_PROVIDERS = ("auto", "slurm", "local")
_HELP_WIDTH = 30


def parse_count(text: str) -> int:
    """A whole number, 0 or more.

    Raises:
        ValueError: `text` is not one.
    """
    if not text.isdecimal():
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def _resources(text: str) -> dict[str, float]:
    found = None
    with contextlib.suppress(ValueError):
        found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{text!r} is not a JSON object; hint: '{{\"disk\": 2}}'")
    return found


def _memory(text: str) -> int:
    return 0 if text.strip() == "0" else parse_size(text)


def _labels(text: str) -> str:
    return labels_text(parse_labels(text))


def _node_types(text: str) -> str:
    """The text of a file of node types, or the text itself, as JSON in one line."""
    if not text.lstrip().startswith("{"):
        try:
            with open(text, encoding="utf-8") as file:
                text = file.read()
        except OSError as error:
            raise ValueError(f"{text!r}: {error.strerror}") from None
    if not text.lstrip().startswith("{"):
        try:
            import yaml
        except ImportError:
            raise ValueError("node types in YAML need PyYAML; hint: write them as JSON") from None
        try:
            text = json.dumps(yaml.safe_load(text))
        except (yaml.YAMLError, TypeError) as error:
            raise ValueError(f"node types: {error}") from None
    _check_node_types(text)
    return json.dumps(json.loads(text), separators=(",", ":"))


def _check_node_types(text: str) -> None:
    from hpcray.core.gcs.node_types import parse_node_types  # only a job that grows needs it

    parse_node_types(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (found := float(text)) < math.inf:
            return found
    raise ValueError(f"{text!r} is not a number of seconds")


class HelpRequested(Exception):
    """`-h` or `--help` is among the options."""


class NodeFlag(NamedTuple):
    """One option of a node on a command line."""

    name: str  # the field of `NodeOptions`, or the key in its `config`
    metavar: str  # of the value in `--help`; "" for a switch, which takes no value
    parse: Callable[[str], Any]  # raises ValueError with the reason
    help: str
    in_config: bool = False

    @property
    def flag(self) -> str:
        """The option as `python -m hpcray` spells it."""
        return "--" + self.name.replace("_", "-")


NODE_FLAGS = (
    NodeFlag("num_cpus", "K", float, "CPUs of this node (default: its share of the host)"),
    NodeFlag("num_gpus", "K", float, "GPUs of this node (default: those it was given)"),
    NodeFlag("memory", "SIZE", _memory, "memory that tasks may ask for (default: what there is)"),
    NodeFlag("object_store_memory", "SIZE", parse_size, "object store, such as 2g (default: 30 % of memory)", True),
    NodeFlag("resources", "JSON", _resources, "custom resources, such as '{\"disk\": 2}'"),
    NodeFlag("labels", "K=V,...", _labels, "labels of this node, for label_selector", True),
    NodeFlag("log_dir", "DIR", str, "log files of workers stay in DIR/node-<number> (%j: Slurm's job)", True),
    NodeFlag("require_rdma", "", bool, "do not start unless object bytes go over RDMA", True),
    NodeFlag("as_ray", "", bool, "the program's `import ray` is hpcray"),
    NodeFlag("ray_libraries", "DIR", str, "as --as-ray, with Ray's own libraries from this directory"),
    NodeFlag("progress", "", bool, "show on standard error how far the tasks are, by function"),
    NodeFlag("driver_rank", "N", parse_count, "the rank whose node runs the program (default: 0)", True),
    NodeFlag("no_program", "", bool, "run none: the job lasts until its nodes have left; programs attach to it"),
    NodeFlag("join", "TOKEN", str, "join the running job that this file is of, as a further node"),
    NodeFlag("min_nodes", "N", parse_count, "further nodes are started until there are so many", True),
    NodeFlag("max_nodes", "N", parse_count, "further nodes are started as they are needed, up to so many", True),
    NodeFlag(
        "node_types", "FILE", _node_types, "kinds of further nodes, as JSON or YAML (docs/how-to/elastic.md)", True
    ),
    NodeFlag(
        "idle_node_timeout", "SECONDS", _seconds, "further nodes are given back after so long (default: 300)", True
    ),
    NodeFlag("end_hangs", "SECONDS", _seconds, "end waits that cannot end, and a job that stands still so long", True),
    NodeFlag("report", "DIR", str, "at the end, write the report on the job into this directory, as one page", True),
    NodeFlag("broadcast_env", "DIR", str, "read this directory once per job, use copies on the nodes"),
)
"""In the order of `--help` and of `to_argv`. `hpcray-launch` builds its options from the same rows."""
_BY_FLAG = {row.flag: row for row in NODE_FLAGS}


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts are in the user's units (CPU: 0.5); None: the node finds the amount out.

    Attributes:
        config: settings given by name; the others come from the environment or are defaults.
        num_cpus: CPUs of this node.
        num_gpus: GPUs of this node; a node that has none declares this many without hardware.
        memory: bytes for tasks that request `memory=`.
        resources: the node's custom resources.
        distributed: whether this process is a rank of a launcher; False: the only node.
        as_ray: whether `import ray` in the program is hpcray.
        ray_libraries: a directory that holds Ray's own libraries (`python -m hpcray.compat libraries`); "": none.
        join: the join token of the running job that this node joins (`runtime.node.join_token.JoinToken`); "": it is of
            a new one.
        no_program: whether the job has none of its own.
        progress: whether the rank that starts the program shows how far its tasks are.
        broadcast_env: a directory that rank 0 reads and all nodes get a copy of; "": none.
        driver: the driver's command line after the interpreter, where a rank is to start one; else empty.
        node_id, node_name: "": the id is drawn, the name is the address.
        address: the IP address by which programs know this node; "": the one that `node_ip_address` finds.
        logs: the directory for the log files of this node; "": what `Config.log_dir` says.
        instance: the batch job that the autoscaler has started this node by, "" for none.
        outlives: whether the end of the process that has started this node is not its own.
    """

    config: dict[str, Any] = {}
    num_cpus: float | None = None
    num_gpus: float | None = None
    memory: float | None = None
    resources: dict[str, float] = {}
    distributed: bool = False
    as_ray: bool = False
    ray_libraries: str = ""
    progress: bool = False
    broadcast_env: str = ""
    join: str = ""
    no_program: bool = False
    driver: list[str] = []
    node_id: str = ""
    node_name: str = ""
    address: str = ""
    logs: str = ""
    instance: str = ""
    outlives: bool = False

    @classmethod
    def from_values(cls, values: dict[str, Any], driver: Sequence[str]) -> NodeOptions:
        """The options of a launcher's rank.

        Args:
            values: by the names of `NODE_FLAGS`; missing, None, False and "" all mean: not given.
            driver: the program's command line after the interpreter.
        """
        given = {row: values[row.name] for row in NODE_FLAGS if _is_given(values.get(row.name))}
        config = {row.name: value for row, value in given.items() if row.in_config}
        fields = {row.name: value for row, value in given.items() if not row.in_config}
        return cls(config=config, distributed=True, driver=list(driver), **fields)

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> NodeOptions:
        """The inverse of `to_argv`. Uses no command-line library: the raylet forks the workers, and what it has loaded
        would shadow the version in a task's own environment.

        Raises:
            ValueError: the command line is wrong; the message names the place.
            HelpRequested: `-h` or `--help` is among the options.
        """
        words, values = list(argv), dict[str, Any]()
        while words and words[0].startswith("-") and words[0] not in ("-", "--", "-m", "-c"):
            flag, equals, text = words.pop(0).partition("=")
            if flag in ("-h", "--help"):
                raise HelpRequested
            row = _BY_FLAG.get(flag)
            if row is None:
                raise ValueError(f"unrecognized option {flag}")
            if bool(equals) > bool(row.metavar):
                raise ValueError(f"{flag} takes no value")
            if row.metavar and not equals:
                if not words:
                    raise ValueError(f"{flag} needs a value")
                text = words.pop(0)
            try:
                values[row.name] = row.parse(text) if row.metavar else True
            except ValueError as error:
                raise ValueError(f"{flag}: {error}") from None
        driver = words[1:] if words[:1] == ["--"] else words
        if values.get("join") or values.get("no_program"):
            if driver:
                raise ValueError("a node that joins a job (--join), or of a job without one (--no-program), runs none")
        elif driver[:1] in (["-m"], ["-c"], []) and len(driver) < 2:
            raise ValueError("no script given; hint: python -m hpcray script.py")
        return cls.from_values(values, driver)

    def to_argv(self) -> list[str]:
        """The words after `python -m hpcray` on a rank's command line."""
        words = []
        for row in NODE_FLAGS:
            value = self.config.get(row.name) if row.in_config else getattr(self, row.name)
            if not _is_given(value):
                continue
            words.append(row.flag)
            if row.metavar:
                words.append(_to_text(value))
        return [*words, *self.driver]

    @staticmethod
    def help_text() -> str:
        """The options, a line each, for `python -m hpcray --help`."""
        rows = [("-h, --help", "show this message and exit")]
        rows += [(f"{row.flag} {row.metavar}".rstrip(), row.help) for row in NODE_FLAGS]
        rows += [
            ("-m MODULE ...", "run a module; what follows belongs to it"),
            ("-c CODE ...", "run code; what follows belongs to it"),
            ("SCRIPT ...", "the program and its arguments"),
        ]
        return "\n".join(f"  {left:<{_HELP_WIDTH}}  {right}" for left, right in rows)

    def with_identity(self, environ: MutableMapping[str, str]) -> NodeOptions:
        """The options with the id and name that the environment gives, which are taken out of it: nodes that the
        program starts are others."""
        node_id, name = environ.pop(NODE_ID, ""), environ.pop(NODE_NAME, "")
        instance = environ.pop(INSTANCE, "") or self.instance
        outlives = bool(environ.pop(OUTLIVES, "")) or self.outlives
        return msgspec.structs.replace(
            self,
            node_id=node_id or self.node_id,
            node_name=name or self.node_name,
            instance=instance,
            outlives=outlives,
        )

    def settings(self) -> Config:
        """The node's settings.

        Raises:
            ValueError: a setting or a variable is not valid.
        """
        config = node_config(os.environ, **self.config)
        parse_labels(config.labels)
        if config.node_types:
            _check_node_types(config.node_types)
        if config.max_nodes and config.max_nodes < config.min_nodes:
            raise ValueError(f"min_nodes={config.min_nodes} is more than max_nodes={config.max_nodes}")
        if config.node_provider not in _PROVIDERS:
            raise ValueError(f"node_provider={config.node_provider!r} is none; hint: one of {', '.join(_PROVIDERS)}")
        return config


def _is_given(value: Any) -> bool:
    return value is not None and value is not False and value not in ("", {})  # 0 is a value


def _to_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.15g}"
    return json.dumps(value) if isinstance(value, dict) else str(value)


def bind_node(
    options: NodeOptions, config: Config, local_size: int, gpus: tuple[str, ...]
) -> tuple[NodeOptions, RankPlan]:
    """Bind this process to the cores of its plan. Call before the template process is forked: it inherits the
    binding.

    Args:
        options: of this node.
        config: the node's settings.
        local_size: ranks on this host.
        gpus: ids of the node's GPUs.

    Returns:
        The options with the number of CPUs filled in, counted before the binding, and the plan that was carried out.
    """
    cpus = options.num_cpus if options.num_cpus is not None else resource_limits.cpus_per_rank(local_size)
    plan = plan_rank(gpus, local_rank(os.environ), local_size, cpus, os.environ, config.bind)
    bind_rank(plan)
    return msgspec.structs.replace(options, num_cpus=cpus), plan


def total_resources(
    options: NodeOptions, address: str, node: int, local_size: int, arena_size: int, gpus: int = 0, gpu_type: str = "",
    accelerators: Mapping[str, float] | None = None,
) -> Resources:  # fmt: skip
    """The resources that this node offers, in units.

    Args:
        options: of this node.
        address: the node's IP address.
        node: its index.
        local_size: ranks on this host, which share what it has.
        arena_size: bytes of its object store.
        gpus: number of its GPUs.
        gpu_type: Ray's name for their type, "" if unknown.
        accelerators: resources of its other accelerators.

    Raises:
        ValueError: a given amount is not valid.
    """
    cpus = options.num_cpus if options.num_cpus is not None else resource_limits.cpus_per_rank(local_size)
    memory = options.memory
    if memory is None:
        memory = max(0, resource_limits.usable_memory() // local_size - arena_size)
    amounts: dict[str, float] = {
        **(accelerators or {}),
        **options.resources,
        "CPU": cpus,
        "GPU": gpus,
        "memory": int(memory),
        "object_store_memory": arena_size,
        f"node:{address}": 1,
    }
    if gpus and gpu_type:
        amounts.setdefault(ACCELERATOR_TYPE + gpu_type, 1)
    if node == 0:
        amounts[HEAD_RESOURCE] = 1
    return to_units(amounts)
