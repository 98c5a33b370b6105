"""The options of `ray start`, and what each does here. The documentation's table is made of these rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from hpcray.common.labels import labels_text, parse_labels

NODE, NAME, PLACE, NOTED = "the node", "the name", "files", "noted"


class StartFlag(Struct, frozen=True):
    """One option.

    Attributes:
        names: as Ray spells it.
        kind: of its value: "int", "float", "text", "bool" (true or false follow), or "switch".
        group: NODE (it describes this node), NAME (part of what the cluster is called), PLACE (where files lie) or
            NOTED (it has no meaning here, and a line in the log says so).
        effect: what it does, for the documentation and --help.
    """

    names: tuple[str, ...]
    kind: str
    group: str
    effect: str

    @property
    def key(self) -> str:
        """The name of the parameter."""
        return max(self.names, key=len).lstrip("-").replace("-", "_")


_NO_PORT = "no component listens at a port"
_NO_DASHBOARD = "the dashboard is `hpcray dashboard`"
_OBSOLETE = "obsolete in Ray too"
_NO_REDIS = "there is no Redis"

START_FLAGS = (
    StartFlag(("--head",), "switch", NAME, "start the first node of a cluster"),
    StartFlag(("--address",), "text", NAME, "H:P, the name of the cluster that this node joins; or auto"),
    StartFlag(("--port",), "int", NAME, "P of the name; a bell listens there (docs/security.md); 0: one that is free"),
    StartFlag(("--block",), "switch", NAME, "stay until the cluster ends"),
    StartFlag(("--num-cpus",), "float", NODE, "CPUs of this node (default: those of the allocation on this host)"),
    StartFlag(("--num-gpus",), "float", NODE, "GPUs of this node (default: those that this process may use)"),
    StartFlag(("--resources",), "text", NODE, "custom resources of this node, a JSON object"),
    StartFlag(("--labels",), "text", NODE, "labels of this node: k=v,k2=v2"),
    StartFlag(("--labels-file",), "text", NODE, "a YAML file of labels of this node"),
    StartFlag(("--memory",), "int", NODE, "bytes for tasks that ask for memory"),
    StartFlag(("--object-store-memory",), "int", NODE, "bytes of this node's object store"),
    StartFlag(("--node-name",), "text", NODE, "name of this node in ray.nodes()"),
    StartFlag(("--node-ip-address",), "text", NODE, "address of this node in ray.nodes() and node:IP"),
    StartFlag(("--temp-dir",), "text", PLACE, "session_latest/logs and ray_current_cluster are here (/tmp/ray)"),
    StartFlag(("--object-spilling-directory",), "text", PLACE, "objects go there that have no room in memory"),
    StartFlag(("--dashboard-port",), "int", NAME, "P of http://H:P, as a name of the cluster; nothing listens there"),
    StartFlag(
        ("--ray-client-server-port",), "int", NAME, "P of ray://H:P, as a name of the cluster; nothing listens there"
    ),
    StartFlag(("--dashboard-host",), "text", NOTED, _NO_DASHBOARD),
    StartFlag(("--include-dashboard",), "bool", NOTED, _NO_DASHBOARD),
    StartFlag(("--dashboard-agent-listen-port",), "int", NOTED, _NO_PORT),
    StartFlag(("--dashboard-agent-grpc-port",), "int", NOTED, _NO_PORT),
    StartFlag(("--dashboard-grpc-port",), "int", NOTED, _NO_PORT),
    StartFlag(("--runtime-env-agent-port",), "int", NOTED, _NO_PORT),
    StartFlag(("--object-manager-port",), "int", NOTED, _NO_PORT),
    StartFlag(("--node-manager-port",), "int", NOTED, _NO_PORT),
    StartFlag(("--gcs-server-port",), "int", NOTED, _OBSOLETE),
    StartFlag(("--min-worker-port",), "int", NOTED, _NO_PORT),
    StartFlag(("--max-worker-port",), "int", NOTED, _NO_PORT),
    StartFlag(("--worker-port-list",), "text", NOTED, _NO_PORT),
    StartFlag(("--metrics-export-port",), "int", NOTED, "metrics come from a Unix socket: `hpcray metrics`"),
    StartFlag(("--redis-password",), "text", NOTED, _NO_REDIS),
    StartFlag(("--redis-username",), "text", NOTED, _NO_REDIS),
    StartFlag(("--redis-shard-ports",), "text", NOTED, _NO_REDIS),
    StartFlag(("--redis-max-memory",), "int", NOTED, _NO_REDIS),
    StartFlag(("--num-redis-shards",), "int", NOTED, _NO_REDIS),
    StartFlag(("--disable-usage-stats",), "switch", NOTED, "nothing is collected"),
    StartFlag(("--include-log-monitor",), "bool", NOTED, "the node itself follows its logs"),
    StartFlag(("--ray-debugger-external",), "switch", NOTED, "`ray debug` goes over Unix sockets"),
    StartFlag(("--no-redirect-output",), "switch", NOTED, "output of workers is in the logs and at the program"),
    StartFlag(("--plasma-directory",), "text", NOTED, "objects are in memory without a file"),
    StartFlag(("--plasma-store-socket-name",), "text", NOTED, _OBSOLETE),
    StartFlag(("--raylet-socket-name",), "text", NOTED, _OBSOLETE),
    StartFlag(("--autoscaling-config",), "text", NOTED, "hpcray-launch --max-nodes has an autoscaler"),
    StartFlag(("--system-config",), "text", NOTED, "settings are HPCRAY_* variables"),
    StartFlag(("--no-monitor",), "switch", NOTED, _OBSOLETE),
    StartFlag(("--enable-object-reconstruction",), "switch", NOTED, "lost objects are made again always"),
    StartFlag(("--tracing-startup-hook",), "text", NOTED, "HPCRAY_TRACE writes spans"),
    StartFlag(("--enable-resource-isolation",), "switch", NOTED, "cgroups are the batch system's"),
    StartFlag(("--system-reserved-cpu",), "float", NOTED, "cgroups are the batch system's"),
    StartFlag(("--system-reserved-memory",), "int", NOTED, "cgroups are the batch system's"),
    StartFlag(("--cgroup-path",), "text", NOTED, "cgroups are the batch system's"),
    StartFlag(("--proxy-server-url",), "text", NOTED, _NO_DASHBOARD),
    StartFlag(("--storage",), "text", NOTED, _OBSOLETE),
    StartFlag(("--log-style",), "text", NOTED, "text is plain"),
    StartFlag(("--log-color",), "text", NOTED, "text is plain"),
    StartFlag(("-v", "--verbose"), "switch", NOTED, "text is plain"),
)
NOT_OF_SYMMETRIC_RUN = ("head", "node_ip_address", "port", "block")
_SILENT = ("disable_usage_stats", "verbose", "log_style", "log_color")


def without_meaning(given: Mapping[str, Any]) -> list[str]:
    """The options that were given and have no meaning here, as a line for the log shows them."""
    rows = [row for row in START_FLAGS if row.group == NOTED and row.key not in _SILENT]
    return [max(row.names, key=len) for row in rows if given.get(row.key) not in (None, False)]


def parse_resources(text: str | None) -> dict[str, float]:
    """The value of --resources.

    Raises:
        ValueError: it is no JSON object of numbers.
    """
    if not text:
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(value, (int, float)) for value in found.values()):
        raise ValueError(f"--resources={text}: not a JSON object of numbers; hint: --resources='{{\"disk\": 2}}'")
    return {str(name): float(value) for name, value in found.items()}


def parse_start_labels(text: str | None, file: str | None) -> str:
    """The labels of --labels, as k=v,... or as JSON, over those of --labels-file, as one text.

    Raises:
        ValueError: they are not valid. OSError: the file cannot be read.
    """
    found: dict[str, str] = {}
    if file:
        found |= _labels_in_file(file)
    if text and text.lstrip().startswith("{"):
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError(f"--labels={text}: not a JSON object; hint: --labels='key1=val1,key2=val2'")
        found |= {str(name): str(value) for name, value in given.items()}
    elif text:
        found |= parse_labels(text)
    return labels_text(found) if found else ""


def _labels_in_file(path: str) -> dict[str, str]:
    with open(path, encoding="utf-8") as file:
        text = file.read()
    try:
        import yaml
    except ImportError:
        rows = [line.partition(":") for line in text.splitlines() if line.strip() and not line.startswith("#")]
        return {name.strip(): value.strip().strip("\"'") for name, _, value in rows}
    try:
        found = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"--labels-file={path}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--labels-file={path}: not a list of `name: value`")
    return {str(name): str(value) for name, value in found.items()}
